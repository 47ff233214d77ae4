"""Ranges by a URL signed once: few signatures, and boto3 itself wherever that does not do."""

from __future__ import annotations

import time

import pytest

from adacheck_store.format.errors import RecordNotFoundError
from adacheck_store.tiers import s3_ranges
from adacheck_store.tiers.object_s3 import S3Objects

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
    assert objects.get("x", len(DATA), 5) == b""
    assert objects.get("x", len(DATA) - 2, 5) == DATA[-2:]
    with pytest.raises(RecordNotFoundError):
        objects.get("y", 1, 5)


def test_a_client_that_lends_no_connections(
    objects: S3Objects, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_ranges.Ranges, "_connections", lambda self, client: None)
    assert objects.get("x", 5, 5) == DATA[5:10]
    assert signed(proxy) == [False]


@pytest.mark.parametrize("how", ["reset", "lost", "cut", "short", "error"])
def test_a_reply_that_goes_wrong(objects: S3Objects, proxy: Proxy, quick: None, how: str) -> None:
    def script(request: Request) -> Fault | None:
        return Fault(how) if request.number == 0 else None

    proxy.restart(script)
    assert objects.get("x", 300, 5000) == DATA[300:5300]
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
