"""The suites of the tiers, and how each is opened by its class's name."""

from pathlib import Path

from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from tests.conformance.doors import Door, LmdbDoor, MemoryDoor, ZarrDoor
from tests.conformance.suite import TierSuite


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


SUITES: dict[str, type[TierSuite]] = {
    suite.tier_class.__name__: suite for suite in (MemorySuite, LmdbSuite, ZarrSuite)
}


def open_for_reading(name: str, path: Path) -> Tier:
    """Open a tier beside another process that writes to it."""
    return LmdbTier(path, readonly=True) if name == "LmdbTier" else SUITES[name]().make(path)
