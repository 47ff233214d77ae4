"""Servers, proxies and stores of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3.proxy import Proxy
from tests.s3.server import OWNER, Server, server, use


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server of this process; LMDBs of S3 stores lie in the test's own folder."""
    found = server()
    use(OWNER)
    monkeypatch.setenv("ADACHECK_CACHE", str(tmp_path / "cache"))
    return found


@pytest.fixture
def proxy(real: Server) -> Iterator[Proxy]:
    """A proxy before it."""
    with Proxy(real.endpoint) as found:
        yield found
