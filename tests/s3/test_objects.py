"""The objects suite on a real server, and on moto as the quick one; names, listings, parts."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from adacheck_store.format.errors import (
    MalformedError,
    NameRefusedError,
    NotOursError,
    RecordNotFoundError,
    TooNewError,
)
from adacheck_store.tiers import s3_multipart
from adacheck_store.tiers.object_s3 import S3Objects, crc32
from adacheck_store.tiers.objects import open_marked
from tests.s3.server import BUCKET, Server

MIB = 1 << 20


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """moto's threaded server: quick, and no judge of integrity or of who may do what."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1",
        aws_access_key_id="any", aws_secret_access_key="any",
    ).create_bucket(Bucket=BUCKET)  # fmt: skip
    yield endpoint
    running.stop()


@pytest.fixture(params=["seaweedfs", "moto"])
def objects(request: pytest.FixtureRequest, real: Server, moto: str) -> S3Objects:
    """An empty place on either server."""
    endpoint = moto if request.param == "moto" else ""
    return S3Objects(real.url(endpoint=endpoint))


def test_put_and_get(objects: S3Objects) -> None:
    """Whole, in ranges, beyond the end, empty, replaced, gone."""
    assert objects.put("a/b/c", [b"0123", bytearray(b"45"), memoryview(b"6789")])
    assert objects.get("a/b/c") == b"0123456789"
    assert objects.get("a/b/c", 3, 4) == b"3456"
    assert objects.get("a/b/c", 3) == b"3456789"
    assert objects.get("a/b/c", 8, 40) == b"89"
    assert objects.get("a/b/c", 40) == b""
    assert objects.get("a/b/c", 10, 5) == b""
    assert objects.get("a/b/c", 0, 0) == b""
    objects.put("a/b/c", [])
    assert objects.get("a/b/c") == b""
    assert objects.get("a/b/c", 3, 4) == b""
    objects.delete(["a/b/c", "a/b/c", "x/y"])
    for act in (lambda: objects.get("a/b/c"), lambda: objects.get("a/b/c", 1, 2),
                lambda: objects.get("a/b"), lambda: objects.get("x", 0, 0)):  # fmt: skip
        with pytest.raises(RecordNotFoundError):
            act()
    assert list(objects.list("")) == []


@pytest.mark.parametrize(
    "name", ["", "/", "a//b", "/a", "a/", "..", "a/../b", ".", "a/./b", "a\0b", "a\nb",
             "x" * 256, "\ud800", "/".join(["x" * 200] * 5 + ["y" * 18])],
)  # fmt: skip
def test_names_are_refused(real: Server, name: str) -> None:
    """Names that a folder could not hold either, or that with the prefix are too long."""
    objects = S3Objects(real.url())
    for act in (
        lambda: objects.put(name, [b"x"]), lambda: objects.get(name),
        lambda: objects.delete([name]),
    ):  # fmt: skip
        with pytest.raises(NameRefusedError):
            act()


def test_listing(objects: S3Objects) -> None:
    """Sorted by whole keys, in any script; what another prefix has is not seen."""
    names = ["a/b", "a.b/c", "a-b", "a/ü/専", "a/b c+d&e=f%2F", "b", "a/z/1", "a.b/a", "ab/1"]
    for name in names:
        objects.put(name, [name.encode()])
    prefix = objects.place.prefix
    S3Objects(objects.place.url.replace(prefix, f"{prefix}0", 1)).put("other", [b"x"])
    assert list(objects.list("")) == sorted(names)
    assert list(objects.list("a/")) == sorted(name for name in names if name.startswith("a/"))
    assert len(list(objects.list("", most=3))) == 3
    assert all(objects.get(name) == name.encode() for name in names)


def test_listing_of_many_pages(real: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page holds a thousand; none is lost between two, and deleting takes as many at once."""
    monkeypatch.setattr("adacheck_store.tiers.object_s3._LISTED_AT_ONCE", 7)
    monkeypatch.setattr("adacheck_store.tiers.object_s3._DELETED_AT_ONCE", 7)
    objects = S3Objects(real.url())
    names = [f"n/{number:03}" for number in range(40)]
    for name in names:
        objects.put(name, [b"x"])
    assert list(objects.list("n/")) == names
    objects.delete(names[:30])
    assert list(objects.list("")) == names[30:]
    counted = objects.requests()
    assert (counted["put"], counted["delete"], counted["list"]) == (40, 5, 6 + 2)
    assert counted["bytes out"] == 40


@pytest.mark.parametrize("objects", ["seaweedfs"], indirect=True)
def test_conditional_create(objects: S3Objects) -> None:
    """Of several threads one wins, and its bytes stay. (Moto looks, and writes afterwards.)"""
    won: list[tuple[int, int]] = []

    def work(number: int) -> None:
        for index in range(4):
            if objects.put(f"log/{index}", [str(number).encode()], if_absent=True):
                won.append((index, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert sorted(index for index, _ in won) == [0, 1, 2, 3]
    assert all(objects.get(f"log/{index}") == str(number).encode() for index, number in won)


def test_marker(objects: S3Objects) -> None:
    """A place is ours, empty, of something else, newer, or damaged; each is left as it is."""
    assert not open_marked(objects, create=False)
    assert open_marked(objects, create=True)
    assert open_marked(objects, create=False)
    objects.probe("adacheck.json")
    objects.put("adacheck.json", [b'{"format": "adacheck-store", "version": 2}'])
    with pytest.raises(TooNewError):
        open_marked(objects, create=True)
    objects.put("adacheck.json", [b"\xff\xfe{"])
    with pytest.raises(MalformedError):
        open_marked(objects, create=True)
    objects.delete(["adacheck.json"])
    objects.put("photos/cat.jpg", [b"meow"])
    for create in (True, False):
        with pytest.raises(NotOursError) as caught:
            open_marked(objects, create=create)
        assert caught.value.place["path"] == objects.path
    assert list(objects.list("")) == ["photos/cat.jpg"]


def test_parts(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large object goes in parts, from buffers of any cut; conditional like any other."""
    monkeypatch.setattr("adacheck_store.tiers.object_s3.MULTIPART_BYTES", 8 * MIB)
    monkeypatch.setattr(s3_multipart, "PART_BYTES", 5 * MIB)
    data = os.urandom(13 * MIB + 7)
    pieces = [data[:3], data[3 : 9 * MIB], b"", memoryview(data)[9 * MIB :]]
    assert objects.put("big", pieces, if_absent=True)
    assert objects.get("big") == data
    assert objects.get("big", 5 * MIB - 2, 5) == data[5 * MIB - 2 : 5 * MIB + 3]
    assert not objects.put("big", [bytes(13 * MIB)], if_absent=True)
    assert objects.get("big") == data
    assert objects.unfinished() == 0, "the one that lost is withdrawn"
    assert objects.put("big", [bytes(9 * MIB)])
    assert objects.get("big") == bytes(9 * MIB)


def test_uploads_of_the_dead_are_swept(real: Server) -> None:
    """Old ones are withdrawn at the first put of a process, by the server's clock; others stay."""
    objects = S3Objects(real.url())
    client, key = real.client(), objects.place.key("base/1")
    client.create_multipart_upload(Bucket=BUCKET, Key=key)
    other = client.create_multipart_upload(Bucket=BUCKET, Key=f"{secrets.token_hex(4)}/x")
    assert objects.unfinished() == 1
    objects.put("a", [b"x"])
    assert objects.unfinished() == 1, "it is young: its writer may live"
    time.sleep(1.1)  # the server's clock has seconds
    assert objects.sweep(age_s=1.0) == 1
    assert objects.unfinished() == 0
    left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=other["Key"])
    assert [item["UploadId"] for item in left["Uploads"]] == [other["UploadId"]]


def test_the_servers_checksum_is_ours(real: Server) -> None:
    """What the server keeps beside an object is the CRC of what the caller gave."""
    objects = S3Objects(real.url())
    objects.put("a", [b"0123", b"456"])
    key = objects.place.key("a")
    found = real.client().head_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    assert found["ChecksumCRC32"] == crc32(b"0123456")
