"""Terms in a bucket: one is deleted from the middle of a run's history."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from tests.s3.door import S3Door
from tests.s3.server import Server
from tests.tools.stores import LAST, RUN, cli, cli_json, train


def bases(url: str) -> set[str]:
    """Keys of the bases in the bucket."""
    with open_for_reading(url) as store:
        return {key for key in store.far.list("") if "/base/" in key}


def test_a_term_deleted_from_the_middle(real: Server, tmp_path: Path) -> None:
    """It is named; what stands without it is restored, kept by gc, and gone on with."""
    url = real.url()
    for to in (LAST - 10, LAST, LAST + 12):
        train(url, to, even=True, keep_bases=100)
    shutil.rmtree(os.environ["ADACHECK_CACHE"])  # the bucket alone is left
    door = S3Door(url)
    middle = [name for name in door.names() if "/t000002-" in name]
    assert middle
    for name in middle:
        door.delete(name)
    term = middle[0].split("/")[1]
    code, found = cli_json("fsck", url)
    assert code == 1
    assert any(term in str(row) for row in found["rows"] if row["row"] == "Finding")
    file = tmp_path / "newest.safetensors"
    code, document = cli_json("restore", url, file)
    assert (code, document["rows"][0]["step"]) == (0, LAST + 12)
    result = cli("export", url, tmp_path / "out", "--format", "safetensors", "--step", LAST - 2)
    assert result.exit_code == 3
    assert "nearest provable steps" in result.stderr
    assert not (tmp_path / "out").exists()
    before = bases(url)
    code, rows = cli_json("gc", url, "--last", 1, "--grace", 0, "--apply")
    assert code == 0, rows
    assert not any("/t000001-" in key for key in before - bases(url))
    toy = train(url, LAST + 14)
    with open_for_reading(url) as store:
        assert toy.same_as(restore_state([store.far], RUN).parts["p000000"])
