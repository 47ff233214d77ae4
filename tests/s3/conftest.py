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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon, and pauses are short."""
    monkeypatch.setattr("adacheck_store.tiers.s3_client._READ_S", 0.4)
    monkeypatch.setattr("adacheck_store.tiers.s3_client._PAUSE_S", 0.01)
    monkeypatch.setattr("adacheck_store.tiers.s3_client._SLOW_PAUSE_S", 0.02)
