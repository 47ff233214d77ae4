"""Doctor and drill on a real S3 server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.format.errors import TierUnavailableError
from adacheck_store.tiers.zarr import ZarrTier
from tests.s3.door import S3Door
from tests.s3.server import BUCKET, READER, Server, use
from tests.tools.stores import cli_json, train

from .proxy import Fault, Proxy, Request


def doctor(url: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and rows by their check."""
    code, document = cli_json("doctor", url)
    return code, {row["check"]: row for row in document["rows"]}


def test_a_prefix_to_be(real: Server) -> None:
    url = real.url()
    code, found = doctor(url)
    assert code == 0, found
    assert found["conditional writes"]["found"] == "heeded"
    assert found["clock"]["verdict"] == "ok"
    assert real.keys(url.split("/")[3].split("?")[0]) == []


def test_who_may_only_read(real: Server) -> None:
    url = real.url()
    use(READER)
    code, found = doctor(url)
    assert code == 1
    assert "s3:PutObject" in found["write"]["remedy"]


def test_a_bucket_that_is_not_there(real: Server) -> None:
    code, found = doctor(real.url().replace(BUCKET, "nobodys"))
    assert code == 1
    assert "no such bucket" in found["access"]["found"]


def test_a_server_without_conditions(real: Server, proxy: Proxy) -> None:
    """It takes every put, whatever its condition: the second one of a name as well."""
    first: list[str] = []

    def script(request: Request) -> Fault | None:
        if request.kind != "PUT" or b"if-none-match" not in request.headers.lower():
            return None
        first.append(request.path)
        return Fault("accept") if first.count(request.path) > 1 else None

    proxy.script = script
    code, found = doctor(real.url(endpoint=proxy.endpoint))
    assert code == 1
    assert found["conditional writes"]["verdict"] == "bad"
    assert "unsafe_no_conditional_writes" in found["conditional writes"]["remedy"]


def test_repair(real: Server) -> None:
    """Objects of every kind are rebuilt in the bucket, out of this machine's disk."""
    url = real.url()
    train(url, 12)
    door = S3Door(url)
    for part in ("/base/", "/pack/"):
        name = [n for n in door.names() if part in n and n.endswith("/c/0")][-1]
        data = bytearray(door.get(name))
        data[5] ^= 1
        door.put(name, bytes(data))
    manifest = next(name for name in door.names() if "/manifest/" in name)
    door.delete(manifest)
    assert cli_json("fsck", url)[0] == 1
    code, document = cli_json("fsck", url, "--repair")
    done = [row["done"] for row in document["rows"] if row["row"] == "RepairRow"]
    assert (code, done) == (4, ["rebuilt"] * 3)
    assert cli_json("fsck", url)[0] == 0


def test_a_check_goes_on(
    real: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What was verified is not read again, but for an object that was put anew: times tell."""
    url, journal, reads = real.url(), tmp_path / "journal", list[str]()
    train(url, 12)
    whole, left = ZarrTier.read_into, [8]

    def read_into(tier: ZarrTier, key: str, *more: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise TierUnavailableError("it does not answer")
        reads.append(key)
        whole(tier, key, *more)

    monkeypatch.setattr(ZarrTier, "read_into", read_into)
    assert cli_json("fsck", url, "--resume", journal)[0] == 3
    assert len(reads) == 8
    door, first = S3Door(url), next(key for key in reads if "/base/" in key)
    name = next(n for n in door.names() if n.startswith(f"{first}/") and n.endswith("/c/0"))
    data = bytearray(door.get(name))
    data[5] ^= 1
    time.sleep(1.1)  # S3 tells seconds
    door.put(name, bytes(data))
    before, left[0] = set(reads) - {first}, 1 << 30
    reads.clear()
    code, document = cli_json("fsck", url, "--resume", journal)
    assert code == 1
    damaged = [row["key"] for row in document["rows"] if row.get("kind") == "block"]
    assert damaged == [first]
    assert first in reads
    # Of a base that was cut off among its arrays nothing is noted.
    assert len(before & set(reads)) <= 1
    assert not journal.exists()


def test_a_drill(real: Server) -> None:
    """Its requests are counted, and nothing in the bucket changes."""
    url = real.url()
    train(url, 12)
    before = real.keys(url.split("/")[3].split("?")[0])
    code, document = cli_json("drill", url)
    assert code == 0, document
    assert real.keys(url.split("/")[3].split("?")[0]) == before
    bucket = document["rows"][1]
    assert bucket["tiers"].keys() == {"zarr"}
    assert bucket["step"] == 12
    assert bucket["requests"] > 0
