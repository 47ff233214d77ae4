"""Every tier runs the whole suite."""

import importlib
import inspect
import pkgutil

import adacheck_store.tiers
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.wrappers import WrapperTier
from tests.conformance import tiers


class TestMemory(tiers.MemorySuite):
    """The reference."""


class TestShared(tiers.SharedSuite):
    """In memory that other processes may read."""


class TestLmdb(tiers.LmdbSuite):
    """On a local disk."""


class TestZarr(tiers.ZarrSuite):
    """In an object store."""


class TestS3(tiers.S3Suite):
    """In a bucket."""


class TestPeerUnix(tiers.PeerUnixSuite):
    """In an agent of this node."""


class TestPeerTls(tiers.PeerTlsSuite):
    """In an agent of another node."""


class TestPeerShared(tiers.PeerSharedSuite):
    """In an agent of this node, by descriptor."""


def _tiers(root: type[Tier]) -> set[type[Tier]]:
    return {root}.union(*(_tiers(below) for below in root.__subclasses__()))


def test_every_tier_has_a_suite() -> None:
    """No tier escapes: every subclass of `Tier` but the wrappers is in a suite that runs.

    The doors of an agent keep no records: they stand before tiers that are in a suite.
    """
    for module in pkgutil.iter_modules(adacheck_store.tiers.__path__):
        importlib.import_module(f"adacheck_store.tiers.{module.name}")
    found = {
        tier
        for tier in _tiers(Tier) - {Tier}
        if not issubclass(tier, WrapperTier) and tier.__module__.startswith("adacheck_store.tiers.")
    }
    suites = (TestMemory, TestShared, TestLmdb, TestZarr, TestS3)
    peers = (TestPeerUnix, TestPeerTls, TestPeerShared)
    ran = {suite.tier_class for suite in (*suites, *peers)}
    assert found == ran == {suite.tier_class for suite in tiers.SUITES.values()}


def test_the_interface_is_small() -> None:
    """At most seven methods, and adapters of at most 30 lines."""
    assert len(Tier.__abstractmethods__) <= 7
    for suite in tiers.SUITES.values():
        assert len(inspect.getsource(suite).splitlines()) <= 30
