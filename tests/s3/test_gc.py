"""gc and tags on S3: floors, objects and uploads that nobody finished, by the server's clock."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import torch

from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.object_s3 import S3Objects
from tests.s3.door import S3Door
from tests.s3.server import BUCKET, Server
from tests.tools.stores import RUN, cli, cli_json, train

END = 42


def test_gc_of_a_bucket(real: Server, tmp_path: Path) -> None:
    """What the rules keep is right and alone; a second run has nothing to do."""
    url = real.url()
    train(url, END, even=True, keep_bases=100)
    door, client = S3Door(url), real.client()
    with open_for_reading(url) as store:
        before = {step: restore_state(store.tiers, RUN, step=step) for step in (0, 13, 16, END)}
    assert cli("tag", url, "good", 13).exit_code == 0
    base = next(name for name in door.names() if "/base/" in name and name.endswith("/c/0"))
    loose = base.replace(base.split("/base/")[1][13:29], secrets.token_hex(8))
    door.put(loose, door.get(base))
    key = door.place.key(f"{RUN}/left")
    client.create_multipart_upload(Bucket=BUCKET, Key=key)
    objects = S3Objects(url)
    assert abs(objects.now() - time.time()) < 5.0
    young = cli_json("gc", url, "--every", 16, "--grace", 0)[1]["rows"]
    assert {row["what"] for row in young} == {"floor", "below floor"}, "nothing else is old"
    time.sleep(1.1)  # the server's clock has seconds
    given = ("gc", url, "--every", 16, "--grace", 0, "--older", "1s", "--apply")
    code, document = cli_json(*given)
    assert code == 0
    rows = {(row["tier"], row["what"]): row for row in document["rows"]}
    assert rows["zarr", "floor"]["kept"] == {"0": ["every"], "13": ["tag good"], "16": ["every"]}
    assert rows["zarr", "unfinished"]["count"] == 1
    assert rows["zarr", "begun"]["count"] == 1
    assert objects.unfinished() == 0
    assert loose not in door.names()
    with open_for_reading(url) as store:
        for step, state in before.items():
            found = restore_state([store.far], RUN, step=step)
            for name, array in state.parts["p000000"].arrays.items():
                assert torch.equal(found.parts["p000000"].arrays[name], array)
    assert cli("fsck", url).exit_code == 0
    names = door.names()
    again = cli_json(*given)[1]["rows"]
    assert {row["done"] for row in again} == {"stands"}
    assert door.names() == names
