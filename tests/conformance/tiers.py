"""The suites of the tiers, and how each is opened by its class's name."""

from pathlib import Path

from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.shared import SharedTier
from adacheck_store.tiers.zarr import ZarrTier
from tests.conformance.doors import Door, LmdbDoor, MemoryDoor, SharedDoor, ZarrDoor
from tests.conformance.hosted import Hosted, socket_of
from tests.conformance.suite import TierSuite
from tests.s3.door import S3Door
from tests.s3.server import url_of


class MemorySuite(TierSuite):
    """Memory."""

    persistent = False
    tier_class = MemoryTier

    def make(self, path: Path) -> Tier:
        """Open it."""
        return MemoryTier()

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        assert isinstance(tier, MemoryTier)
        return MemoryDoor(tier)


class SharedSuite(TierSuite):
    """Memory that other processes may read."""

    persistent = False
    tier_class = SharedTier

    def make(self, path: Path) -> Tier:
        """Open it."""
        return SharedTier()

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        assert isinstance(tier, SharedTier)
        return SharedDoor(tier)


class LmdbSuite(TierSuite):
    """LMDB."""

    tier_class = LmdbTier

    def make(self, path: Path) -> Tier:
        """Open it."""
        return LmdbTier(path)

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        return LmdbDoor(path)


class ZarrSuite(TierSuite):
    """Zarr in a local folder."""

    packs = True
    tier_class = ZarrTier

    def make(self, path: Path) -> Tier:
        """Open it."""
        return ZarrTier(LocalObjects(path))

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        return ZarrDoor(path)


class S3Suite(TierSuite):
    """Zarr on a real S3 server."""

    name = "ZarrTier on S3"
    packs = True
    tier_class = ZarrTier

    def make(self, path: Path) -> Tier:
        """Open it."""
        return ZarrTier(S3Objects(url_of(path)))

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        return S3Door(url_of(path))


class PeerUnixSuite(TierSuite):
    """An agent's LMDB tier by a unix socket."""

    name = "PeerTier by unix"
    tier_class = PeerTier

    def make(self, path: Path) -> Tier:
        """Serve and connect."""
        return Hosted(LmdbTier(path), socket_of(path))

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        return LmdbDoor(path)


class PeerTlsSuite(TierSuite):
    """An agent's memory tier by TLS."""

    name = "PeerTier by TLS"
    persistent = False
    several_runs = False
    tier_class = PeerTier

    def make(self, path: Path) -> Tier:
        """Serve and connect."""
        return Hosted(MemoryTier(), "tls://127.0.0.1:0")

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        assert isinstance(tier, Hosted)
        assert isinstance(tier.inner, MemoryTier)
        return MemoryDoor(tier.inner)


class PeerSharedSuite(SharedSuite):
    """An agent's memory, read where it lies by processes of its node."""

    name = "PeerTier by descriptor"
    tier_class = PeerTier

    def make(self, path: Path) -> Tier:
        """Serve and connect."""
        return Hosted(SharedTier(), socket_of(path))

    def door(self, path: Path, tier: Tier) -> Door:
        """Get behind it."""
        assert isinstance(tier, Hosted)
        return super().door(path, tier.inner)


SUITES: dict[str, type[TierSuite]] = {
    suite.name or suite.tier_class.__name__: suite
    for suite in (
        *(MemorySuite, SharedSuite, LmdbSuite, ZarrSuite, S3Suite),
        *(PeerUnixSuite, PeerTlsSuite, PeerSharedSuite),
    )
}


def open_for_reading(name: str, path: Path) -> Tier:
    """Open a tier beside another process that writes to it."""
    if name == PeerUnixSuite.name:
        return PeerTier(Peer(socket_of(path)), "inner")
    return LmdbTier(path, readonly=True) if name == "LmdbTier" else SUITES[name]().make(path)
