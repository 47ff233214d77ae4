"""Ranges that are asked for without boto3's calls, and by them where that does not do."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import urllib3

from adacheck_store.format.errors import RecordNotFoundError
from adacheck_store.tiers import s3_ranges
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.s3_errors import ShortReadError

from .proxy import Fault, Proxy, Request
from .server import OWNER, Server

DATA = bytes(range(256)) * 40
QUERY = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=k%2F20300101%2Feu-west-1%2Fs3%2F"
    "aws4_request&X-Amz-Date=20300101T000000Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&"
    "X-Amz-Signature=0f"
)


@pytest.fixture
def objects(real: Server, proxy: Proxy) -> S3Objects:
    """One object, and nothing asked for yet."""
    found = S3Objects(real.url(endpoint=proxy.endpoint))
    found.put("x", [DATA])
    proxy.requests.clear()
    return found


def get(objects: S3Objects, name: str, start: int = 0, length: int = 1000) -> bytes:
    """The bytes of a range, read in both ways."""
    out = bytearray(length)
    count = objects.get_into(name, start, memoryview(out))
    found = objects.get(name, start, length)
    assert out[:count] == found
    return found


def ours(proxy: Proxy) -> list[bool]:
    """Of each request whether it was put together without boto3's calls."""
    return [b"Boto3/" not in request.headers for request in proxy.requests]


def test_ranges_are_asked_for_without_boto3(objects: S3Objects, proxy: Proxy) -> None:
    """Signed, and no signature in a URL, which may end up in a log."""
    before = objects.requests().get("get", 0)
    for start in range(0, 10_000, 1000):
        assert objects.get("x", start, 1000) == DATA[start : start + 1000]
    assert objects.get("x", 10_200) == DATA[10_200:]
    assert len({request.path for request in proxy.requests}) == 1
    assert ours(proxy) == [True] * 11
    assert all(b"Signature=" in request.headers for request in proxy.requests)
    assert not any("Signature" in request.path for request in proxy.requests)
    assert objects.requests()["get"] - before == 11


def test_names_of_all_sorts(real: Server, proxy: Proxy) -> None:
    """A key is encoded as boto3 encodes it."""
    names = ["a b", "+~%41", "ü/é=1", "key", "c&d?e#f", "(g)'h!*"]
    objects = S3Objects(real.url(endpoint=proxy.endpoint))
    for name in names:
        objects.put(name, [name.encode() * 9])
    proxy.requests.clear()
    for name in names:
        assert get(objects, name) == name.encode() * 9
    assert ours(proxy) == [True] * 2 * len(names)


@pytest.mark.parametrize("more", ["", "&X-Amz-Security-Token=t"])
def test_a_plain_way(more: str) -> None:
    way = s3_ranges._way_of(None, f"https://b.host/key?{QUERY}{more}")
    assert (way.start, way.region, way.plain) == ("https://b.host/", "eu-west-1", True)


@pytest.mark.parametrize(
    ("old", "new"),
    [("/key?", "/other?"), ("AWS4-HMAC", "AWS4-ECDSA-P256"), ("%2Fs3%2F", "%2Fs3express%2F"),
     ("&X-Amz-Date", "&X-Amz-S3session-Token=t&X-Amz-Date"), ("%2Feu-west-1", ""),
     ("?", "?x-id=GetObject&"), ("?", "?AWSAccessKeyId=a&")],
)  # fmt: skip
def test_what_is_signed_otherwise_is_left_to_boto3(old: str, new: str) -> None:
    """Directory buckets, access points of several regions, and what is not known yet."""
    url = f"https://b.host/key?{QUERY}"
    assert old in url
    assert not s3_ranges._way_of(None, url.replace(old, new, 1)).plain


def test_boto3_reads_where_signatures_are_others(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_ranges, "_SERVICE", "s3express")
    assert get(objects, "x", 5, 5) == DATA[5:10]
    assert ours(proxy) == [False, False]


def test_a_signature_that_is_refused(
    objects: S3Objects, proxy: Proxy, real: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boto3 is asked, whose word it is what is wrong."""
    lent = s3_ranges.Ranges._lent
    wrong = real.client((OWNER[0], "wrong"))
    monkeypatch.setattr(
        s3_ranges.Ranges, "_lent", lambda self, client: (lent(client)[0], lent(wrong)[1])
    )
    assert get(objects, "x", 5, 5) == DATA[5:10]
    assert ours(proxy) == [True, False] * 2


def test_what_is_no_range(objects: S3Objects) -> None:
    """Beyond the end, of no length, of no object."""
    assert get(objects, "x", len(DATA), 5) == b""
    assert get(objects, "x", len(DATA) - 2, 5) == DATA[-2:]
    assert get(objects, "x", 5, 0) == b""
    with pytest.raises(RecordNotFoundError):
        objects.get("y", 1, 5)
    for nbytes in (0, 5):
        with pytest.raises(RecordNotFoundError):
            objects.get_into("y", 1, memoryview(bytearray(nbytes)))


@pytest.mark.parametrize("lent", [(None, None), (object(), None), (None, object())])
def test_a_client_that_lends_no_connections_or_signer(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, lent: tuple[Any, Any]
) -> None:
    monkeypatch.setattr(s3_ranges.Ranges, "_lent", lambda self, client: lent)
    assert get(objects, "x", 5, 5) == DATA[5:10]
    assert ours(proxy) == [False, False]


def test_memory_is_filled_over_few_connections(objects: S3Objects, proxy: Proxy) -> None:
    """Also where the place's own HTTP client is another than we know."""
    out = bytearray(1000)
    for start in range(0, 9000, 1000):
        assert objects.get_into("x", start, memoryview(out)) == 1000
        assert out == DATA[start : start + 1000]
    assert ours(proxy) == [True] * 9
    session, _ = s3_ranges.Ranges._lent(objects._s3._client)
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


def test_a_new_client_signs_by_itself(objects: S3Objects) -> None:
    """Its credentials may be others."""
    assert objects.get("x", 1, 2) == DATA[1:3]
    client = objects._s3._client
    objects._s3._renew(objects._s3._made)
    assert objects.get("x", 1, 2) == DATA[1:3]
    assert objects._s3._client is not client
    way = objects._ranges._known
    assert way is not None
    assert way.client is objects._s3._client


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
