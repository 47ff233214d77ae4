"""Every request of a put and of a run that drains fails once, in turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from adacheck_store.tiers.base import Source
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.zarr import ZarrTier
from tests.conformance.records import MIB, World, grads, noise, same
from tests.s3.proxy import Fault, Proxy, at
from tests.s3.server import Server
from tests.tools.stores import RUN, cli_json, train

pytestmark = pytest.mark.fault

PASSING = [
    Fault("lost"), Fault("error", 503, "SlowDown"), Fault("reset"),
    Fault("error", 500, "InternalError"), Fault("cut"),
]  # fmt: skip
FINAL = Fault("error", 403, "AccessDenied")


def batches(world: World) -> list[list[Source]]:
    """Several puts: with chunks, packs, documents and a claim."""
    arrays = {"layers/param": ("F32", noise(9 * MIB)), "layers/exp_avg": ("F32", noise(100))}
    deltas: list[Source] = [world.delta(step, grads(500)) for step in range(1, 4)]
    return [
        [*world.roots(), world.claim(1)], [world.base(2, arrays)],
        [*deltas, world.extra(1), world.extra(2)],
    ]  # fmt: skip


def play(tier: ZarrTier, puts: list[list[Source]]) -> list[AdaCheckError]:
    """Put all, each again if it fails; what failed."""
    troubles = []
    for sources in puts:
        try:
            tier.put(sources)
        except AdaCheckError as error:
            troubles.append(error)
            tier.put(sources)
    return troubles


def each_position(real: Server, proxy: Proxy, faults: list[Fault], every: int = 1) -> None:
    """Play with a fault at request 0, ``every``, ... until there is none that it would strike.

    A fault that passes is not seen by who puts. A refusal is an error of that put, which leaves
    nothing half, and may be made again.
    """
    number, made = 0, 1
    while number < made:
        world, url = World(), real.url(endpoint=proxy.endpoint, parallel="1")
        fault = faults[number // every % len(faults)]
        proxy.restart(at(number, fault))
        tier = ZarrTier(S3Objects(url))
        puts = batches(world)
        troubles = play(tier, puts)
        made = len(proxy.requests)
        proxy.restart()
        assert len(troubles) <= (fault is FINAL), (number, troubles)
        for sources in puts:
            assert same(tier, sources), number
        assert list(tier.list("")) == sorted({s.key for sources in puts for s in sources})
        assert list(tier.orphans("")) == [], number
        number += every
    assert number > 20


@pytest.mark.usefixtures("quick")
def test_put(real: Server, proxy: Proxy) -> None:
    """Every other request of a few puts fails once, each in one of three ways."""
    each_position(real, proxy, [FINAL, *PASSING[:2]], every=2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", [*PASSING, FINAL], ids=lambda fault: fault.how + fault.code)
def test_put_in_every_way(real: Server, proxy: Proxy, fault: Fault) -> None:
    """Every request, in each way."""
    each_position(real, proxy, [fault])


def drained(real: Server, proxy: Proxy, number: int, fault: Fault, cache: Path) -> int:
    """A run that drains, with a fault at one request; how many requests it made.

    A start that is refused is made again, as a user would.
    """
    prefix = real.url().partition("?")[0].rpartition("/")[2]
    through, url = real.url(prefix, proxy.endpoint, parallel="1"), real.url(prefix)
    proxy.restart(at(number, fault))
    try:
        train(through, 9, base_every=3, object_lag=2)
    except AdaCheckError:
        train(through, 9, base_every=3, object_lag=2)
    made = len(proxy.requests)
    proxy.restart()
    shutil.rmtree(cache)
    with open_for_reading(url) as store:
        assert restore_state(store.tiers, RUN).step == 9, number
    code, document = cli_json("fsck", url)
    assert code == 0, (number, document)
    return made


def test_drain_gets_over_it(real: Server, proxy: Proxy, tmp_path: Path) -> None:
    """Every so many requests of a run, each time by another fault: all is drained in the end."""
    faults = [*PASSING, FINAL]
    number, made = 0, 1
    while number < made:
        made = drained(real, proxy, number, faults[number // 41 % len(faults)], tmp_path / "cache")
        number += 41
    assert number > 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fault", [*PASSING, FINAL], ids=lambda fault: fault.how + fault.code)
def test_drain_at_every_position(real: Server, proxy: Proxy, tmp_path: Path, fault: Fault) -> None:
    """Each request of a run, by each fault."""
    number, made = 0, 1
    while number < made:
        made = drained(real, proxy, number, fault, tmp_path / "cache")
        number += 1
    assert number > 100
