"""Ranges by a URL signed once: few signatures, and boto3 itself wherever that does not do."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import urllib3

from adacheck_store.format.errors import RecordNotFoundError
from adacheck_store.tiers import s3_ranges
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.s3_errors import ShortReadError

from .proxy import Fault, Proxy, Request
from .server import Server

DATA = bytes(range(256)) * 40


@pytest.fixture
def objects(real: Server, proxy: Proxy) -> S3Objects:
    """One object, and nothing asked for yet."""
    found = S3Objects(real.url(endpoint=proxy.endpoint))
    found.put("x", [DATA])
    proxy.requests.clear()
    return found


def get(objects: S3Objects, start: int, length: int) -> bytes:
    """The bytes of a range, read in both ways."""
    out = bytearray(length)
    count = objects.get_into("x", start, memoryview(out))
    found = objects.get("x", start, length)
    assert out[:count] == found
    return found


def signed(proxy: Proxy) -> list[bool]:
    """Of each request whether its URL was signed."""
    return ["X-Amz-Signature" in request.path for request in proxy.requests]


def test_one_signature_does_for_all_ranges(objects: S3Objects, proxy: Proxy) -> None:
    before = objects.requests().get("get", 0)
    for start in range(0, 10_000, 1000):
        assert objects.get("x", start, 1000) == DATA[start : start + 1000]
    assert objects.get("x", 10_200) == DATA[10_200:]
    assert len({request.path for request in proxy.requests}) == 1
    assert signed(proxy) == [True] * 11
    assert objects.requests()["get"] - before == 11


def test_a_signature_that_has_expired(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, boto3 is asked, and the next range is signed anew."""
    monkeypatch.setattr(s3_ranges, "_VALID_S", 1)
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() / 1000)
    assert objects.get("x", 5, 5) == DATA[5:10]
    time.sleep(2.1)
    assert objects.get("x", 6, 5) == DATA[6:11]
    assert objects.get("x", 7, 5) == DATA[7:12]
    assert signed(proxy) == [True, True, False, True]


def test_what_is_no_range(objects: S3Objects) -> None:
    """Beyond the end, of no length, of no object."""
    assert get(objects, len(DATA), 5) == b""
    assert get(objects, len(DATA) - 2, 5) == DATA[-2:]
    assert get(objects, 5, 0) == b""
    with pytest.raises(RecordNotFoundError):
        objects.get("y", 1, 5)
    for nbytes in (0, 5):
        with pytest.raises(RecordNotFoundError):
            objects.get_into("y", 1, memoryview(bytearray(nbytes)))


def test_a_client_that_lends_no_connections(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_ranges.Ranges, "_connections", lambda self, client: None)
    assert get(objects, 5, 5) == DATA[5:10]
    assert signed(proxy) == [False, False]


def test_memory_is_filled_over_few_connections(objects: S3Objects, proxy: Proxy) -> None:
    """Also where the place's own HTTP client is another than we know."""
    out = bytearray(1000)
    for start in range(0, 9000, 1000):
        assert objects.get_into("x", start, memoryview(out)) == 1000
        assert out == DATA[start : start + 1000]
    assert signed(proxy) == [True] * 9
    session = s3_ranges.Ranges._connections(objects._s3._client)
    (pool,) = session._manager.pools._container.values()
    assert pool.num_connections <= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_ranges, "HTTPResponse", tuple)
        assert objects.get_into("x", 7, memoryview(out)) == 1000
        assert out == DATA[7:1007]


@pytest.mark.parametrize("way", ["get", "into"])
@pytest.mark.parametrize("how", ["reset", "lost", "cut", "short", "error"])
def test_a_reply_that_goes_wrong(
    objects: S3Objects, proxy: Proxy, quick: None, how: str, way: str
) -> None:
    def script(request: Request) -> Fault | None:
        return Fault(how) if request.number == 0 else None

    proxy.restart(script)
    if way == "get":
        assert objects.get("x", 300, 5000) == DATA[300:5300]
    else:
        out = bytearray(5000)
        assert objects.get_into("x", 300, memoryview(out)) == 5000
        assert out == DATA[300:5300]
    assert len(proxy.requests) >= 2


def test_a_new_client_signs_anew(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its credentials may be others."""
    assert objects.get("x", 1, 2) == DATA[1:3]
    client = objects._s3._client
    objects._s3._renew(objects._s3._made)
    assert objects.get("x", 1, 2) == DATA[1:3]
    assert objects._s3._client is not client
    (kept,) = objects._ranges._signed.values()
    assert kept[0] is objects._s3._client


def test_a_reply_in_chunks_that_is_cut() -> None:
    """Is a short read, to be tried again, like any other."""
    body = b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n9\r\n56"
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(body)

        server = threading.Thread(target=answer)
        server.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with urllib3.PoolManager(retries=False) as pool:
            reply = pool.request("GET", url, preload_content=False)
            with pytest.raises(ShortReadError):
                s3_ranges._fill(reply, memoryview(bytearray(14)))
        server.join()
