"""A zombie that is cut off with its agent: all it goes on doing is of its own term, and ends."""

import contextlib
import signal

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.errors import TierUnavailableError
from adacheck_store.format.keys import parse_key
from adacheck_store.recovery import plan_restore
from adacheck_store.terms import Entry, read_log
from tests.agent.kit import until
from tests.agent.trainer import RUN
from tests.cluster.kit import Cluster, Host, Start

pytestmark = pytest.mark.fault

STEPS, FORK, NEWEST, ALONE = 18, 7, 13, 16


def drained(host: Host) -> bool:
    """Whether nothing waits at the node's agent, as far as it answers in time."""
    with contextlib.suppress(TierUnavailableError):
        host.ask("flush", hurry=True)
        return not any(drain["waiting_records"] for drain in host.status()["drains"].values())
    return False


def far_of(made: Cluster, new: str, old: str) -> tuple[set[str], list[Entry], int]:
    """The far tier's keys of the new term, the old one's log, and the step it can produce."""
    with made.tiers() as tiers:
        keys = set(tiers[0].list(f"{RUN}/{new}/"))
        log = [entry for entry in read_log(tiers[0], RUN) if entry.term == old]
        return keys, log, plan_restore(read_catalog(tiers, RUN)).step


def goes_on_alone(made: Cluster, start: Start, zombie: Host, term: str) -> None:
    """The trainer of rank 0 wakes, finds nobody, and trains on; its agent drains what it makes."""
    start.gate.open(STEPS)
    zombie.signal(signal.SIGCONT)
    start.one(0, 0, "alone")

    def far() -> int:
        drained(zombie)  # in a hurry
        with made.tiers() as tiers:
            keys = map(parse_key, tiers[0].list(f"{RUN}/{term}/p000000/"))
            return max(key.step for key in keys)

    until(lambda: far() >= ALONE, "the zombie's agent has drained steps that it made alone")


def test_a_zombie_cut_off_with_its_agent_touches_nothing_of_the_new_term(cluster):
    """Rank 0 and its agent, which raises floors and prunes, lose their link; the run goes on.

    What it makes alone is no step, for it has one part of two: no watermark follows it, and so no
    floor. That one which was chosen before is not written after is `tests/agent/test_fences.py`.
    """
    made = cluster("fsdp", 2, {"steps": STEPS, "width": 2003}, lent=True)
    undead = made.start("ab", zombie=True)
    undead.held(0, FORK)
    made.settle("ab", FORK)
    zombie, other = made.host("a"), made.host("b")
    old = zombie.status()["term"]
    zombie.signal(signal.SIGSTOP)
    other.stop_training()
    made.network.cut(zombie.number)
    start = made.start("bd")
    assert [(row["restored"], row["lost"]) for row in start.restored(0)] == [(FORK, 0)] * 2
    start.held(0, NEWEST)
    made.settle("bd", NEWEST)
    until(lambda: all(map(drained, start.hosts)), "the new term is drained")
    new = other.status()["term"]
    assert new > old
    before = far_of(made, new, old)
    assert before[2] == NEWEST
    goes_on_alone(made, undead, zombie, old)
    told = zombie.status()
    assert told["term"] == old
    assert told["watermark"] <= FORK < ALONE <= told["chains"]["p000000"]["newest_step"]
    assert undead.row(0, 0, "fenced") is None
    assert far_of(made, new, old) == before
    made.network.mend(zombie.number)
    assert new in undead.one(0, 0, "fenced")["fenced"]
    assert zombie.status()["term"] == new
    until(lambda: not zombie.status()["trainers"], "its trainer, which was told, has gone")
    until(lambda: drained(zombie), "its agent has drained what it could")
    assert far_of(made, new, old) == before
    start.held(0, NEWEST + 3)
    made.settle("bd", NEWEST + 3)
    for host in start.hosts:
        for name, chain in host.status()["chains"].items():
            assert zombie.name not in chain["holders"], (name, chain)
    zombie.kill_agent()
    with made.tiers("a") as tiers:
        written = [parse_key(key) for tier in tiers for key in tier.list(f"{RUN}/{new}/")]
        kept = [parse_key(key) for key in tiers[1].list(f"{RUN}/{new}/")]
        assert plan_restore(read_catalog(tiers, RUN)).step >= NEWEST
    assert written
    assert not [key for key in kept if key.kind in ("base", "delta", "extra")]
    start.finish(0, STEPS)
