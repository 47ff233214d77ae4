"""SIGKILL at every failpoint: afterwards each record is whole or absent, and can be put again."""

import signal
from pathlib import Path

import pytest

from adacheck_store.format.record import verify_record
from adacheck_store.tiers import failpoints
from adacheck_store.tiers.base import Tier
from tests.conformance.records import fetch, same
from tests.conformance.tiers import SUITES
from tests.faults.crasher import puts
from tests.forked import Forked, run

pytestmark = pytest.mark.fault


def crash(name: str, path: Path, *specs: str) -> tuple[int, list[list[str]]]:
    """Run the crasher; returns its exit status and what it said was done."""
    code, said = run(["tests.faults.crasher", name, str(path), *specs])
    assert code in (0, -signal.SIGKILL), said
    return code, [line.split() for line in said.splitlines()]


def check_survivors(name: str, tier: Tier, said: list[list[str]]) -> None:
    """Every record that is listed verifies; what was put is there; all of it can be put again."""
    script = list(puts())
    listed = set(tier.list(""))
    for key in listed:
        verify_record(fetch(tier, key))
    deleting = ["put", str(len(script) - 1)] in said
    for what, number in said:
        if what == "put" and not (number == "2" and deleting):
            assert {source.key for source in script[int(number)]} <= listed
    if name == "LmdbTier":
        # One transaction: the records of a put are there together or not at all.
        for sources in script:
            assert len({source.key in listed for source in sources}) == 1
    for sources in script:
        tier.put(sources)
        assert same(tier, sources)
    tier.sync()


CASES = [
    (tier, point)
    for point in failpoints.names()
    for tier in ("LmdbTier", "ZarrTier")
    if point.startswith("lmdb" if tier == "LmdbTier" else "local") or "folder" in point
]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("name", "point"), CASES)
def test_killed_at(tmp_path: Path, name: str, point: str, count: int) -> None:
    """Kill a process at a failpoint's first or fourth passing."""
    path = tmp_path / "tier"
    if point.startswith("lmdb.sweep"):
        # Only a put that did not end leaves anything to sweep.
        assert crash(name, path, "lmdb.page.after:2")[0] == -signal.SIGKILL
    status, said = crash(name, path, f"{point}:{count}")
    assert status == -signal.SIGKILL or count > 1, "the failpoint was never passed"
    if not path.exists():
        aside = path.with_name("tier-damaged-1")
        path = aside if aside.exists() else path
    tier = SUITES[name]().make(path)
    check_survivors(name, tier, said)
    tier.close()
    if name == "LmdbTier":
        assert not SUITES[name]().door(path, tier).leftovers()


def test_unharmed(tmp_path: Path) -> None:
    """The crasher itself is sound: with no failpoint armed it ends, and passes most of them."""
    for name in ("LmdbTier", "ZarrTier"):
        status, said = crash(name, tmp_path / name)
        assert status == 0
        assert ["deleted", "2"] in said


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Kill by time, whatever it is doing."""
    for number, name in enumerate(["LmdbTier", "ZarrTier"] * 3):
        path = tmp_path / f"{name}-{number}"
        process = Forked(["tests.faults.crasher", name, str(path)])
        lines = [process.stdout.readline() for _ in range(number + 1)]
        process.kill()
        rest = process.stdout.read()
        process.stdout.close()
        process.wait(30)
        said = [line.split() for line in "".join([*lines, rest]).splitlines()]
        aside = path.with_name(path.name + "-damaged-1")
        tier = SUITES[name]().make(aside if aside.exists() else path)
        check_survivors(name, tier, said)
        tier.close()
