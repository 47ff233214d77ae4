"""TLS with a certificate of one's own, and buckets that are named as hosts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from adacheck_store.format.errors import AccessRefusedError
from adacheck_store.tiers.object_s3 import S3Objects
from tests.tools.stores import RUN, cli_json, train

from .proxy import Proxy
from .server import BUCKET, DOMAIN, Server


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names of the domain are this host's."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **named: Any) -> Any:
        ours = isinstance(host, str) and host.endswith(DOMAIN)
        return real("127.0.0.1" if ours else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_certificate_that_the_url_names(real: Server) -> None:
    """A run is kept and restored over TLS."""
    url = real.url(endpoint=real.https, ca=str(real.ca))
    train(url, 6)
    code, document = cli_json("fsck", url)
    assert code == 0, document
    code, document = cli_json("drill", url, "--run", RUN)
    assert code == 0
    assert document["rows"][1]["step"] == 6


def test_a_certificate_that_the_environment_names(
    real: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(real.ca))
    objects = S3Objects(real.url(endpoint=real.https))
    assert objects.put("x", [b"data"])
    assert objects.get("x") == b"data"


def test_a_certificate_that_nobody_vouches_for(real: Server) -> None:
    """One clear error at once, and what to do."""
    with pytest.raises(AccessRefusedError, match="certificate is not trusted") as caught:
        S3Objects(real.url(endpoint=real.https)).get("x")
    assert "ca=" in caught.value.hint


def test_a_certificate_for_another_host(real: Server) -> None:
    url = real.url(endpoint=real.https.replace("127.0.0.1", "localhost"), ca=str(real.ca))
    with pytest.raises(AccessRefusedError, match="certificate is not trusted"):
        S3Objects(url).get("x")


@pytest.mark.parametrize(("style", "within"), [("virtual", False), ("path", True), ("auto", True)])
def test_how_a_bucket_is_named(
    real: Server, proxy: Proxy, named: None, style: str, within: bool
) -> None:
    endpoint = proxy.endpoint.replace("127.0.0.1", DOMAIN)
    objects = S3Objects(real.url(endpoint=endpoint, style=style))
    assert objects.put("a/b", [b"data"], if_absent=True)
    assert not objects.put("a/b", [b"other"], if_absent=True)
    assert objects.get("a/b", 1, 2) == b"at"
    assert list(objects.list("")) == ["a/b"]
    assert {request.path.startswith(f"/{BUCKET}") for request in proxy.requests} == {within}
    hosts = {
        request.headers.lower().count(f"host: {BUCKET}.".encode()) for request in proxy.requests
    }
    assert hosts == {int(not within)}


def test_virtual_style_over_tls(real: Server, named: None, tmp_path: Path) -> None:
    endpoint = real.https.replace("127.0.0.1", DOMAIN)
    url = real.url(endpoint=endpoint, style="virtual", ca=str(real.ca))
    train(url, 4)
    code, document = cli_json("restore", url, tmp_path / "x.safetensors")
    assert code == 0, document
    assert document["rows"][0]["step"] == 4
