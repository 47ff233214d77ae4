"""The other pairs of a transport and a tier behind it; one of each is in every run."""

from pathlib import Path

import pytest

from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from tests.conformance import tiers
from tests.conformance.doors import Door, ZarrDoor
from tests.conformance.hosted import Hosted, socket_of

pytestmark = pytest.mark.slow


class TestLmdbByTls(tiers.PeerUnixSuite):
    """Another node's LMDB. No other process knows the port."""

    several_runs = False
    readers = False

    def make(self, path: Path) -> Tier:
        """Serve and connect."""
        return Hosted(LmdbTier(path), "tls://127.0.0.1:0")


class TestZarrByUnix(tiers.PeerUnixSuite):
    """A far tier that an agent writes: it takes records in an order of its own."""

    packs = True

    def make(self, path: Path) -> Tier:
        """Serve and connect."""
        return Hosted(ZarrTier(LocalObjects(path)), socket_of(path))

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        return ZarrDoor(path)
