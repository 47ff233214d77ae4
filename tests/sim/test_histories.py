"""Random histories of agents, trainers, network and disks against the invariants."""

from collections import Counter

import pytest

from adacheck_store.agent import budget
from tests.sim import histories
from tests.sim.__main__ import shrink, tell
from tests.sim.histories import Plan, make_plan, run
from tests.sim.test_rules import stored_is_enough
from tests.sim.truth import Violation

BLOCK = 1000
BLOCKS = 10


LEAST = {
    "failed drains": 10, "drains cut off": 4, "drains unheard": 4, "late drains of the dead": 1,
    "records drained again": 100, "repairs": 60, "repairs done": 60, "repairs killed": 1,
    "damaged, rebuilt": 20, "missing, rebuilt": 1, "damaged, set aside": 1, "damaged, left": 1,
}  # fmt: skip
"""How often something happens in any thousand histories, at least."""


def check(seed: int) -> Counter[str]:
    """One history, and what its drains and repairs came to; a failure says how to see it again."""
    try:
        return run(make_plan(seed)).seen
    except Exception as error:
        pytest.fail(f"seed {seed}: {error}\nsee it again: python -m tests.sim {seed}")


@pytest.mark.parametrize("block", range(BLOCKS))
def test_histories(block: int) -> None:
    """Nothing acknowledged is lost, invented, mixed or deleted, and nothing is stuck.

    Meanwhile drains fail, half or whole, unheard and late; repairs rebuild, set aside, leave, die.
    """
    seen: Counter[str] = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        seen += check(seed)
    assert not {what: seen[what] for what, least in LEAST.items() if seen[what] < least}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_histories(request: pytest.FixtureRequest) -> None:
    """As many as asked for with --seeds, others than the default run's."""
    for seed in range(BLOCK * BLOCKS, BLOCK * BLOCKS + request.config.getoption("--seeds")):
        check(seed)


def test_a_seed_is_a_history() -> None:
    """The same seed gives the same history, line by line."""
    for seed in range(20):
        told: list[list[str]] = [[], []]
        for trace in told:
            run(make_plan(seed), trace)
        assert told[0] == told[1]


def fails(plan: Plan) -> bool:
    """True if a history breaks an invariant."""
    try:
        run(plan)
    except Violation:
        return True
    return False


def test_a_failing_history_is_told_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is the story of as few faults as still fail, up to what went wrong."""
    stored_is_enough(monkeypatch)
    many = [plan for plan in map(make_plan, range(1000)) if len(plan.faults) > 2]
    plan = next(plan for plan in many if fails(plan))
    assert tell(plan) == 1
    printed = capsys.readouterr().out
    with pytest.raises(Violation) as found:
        run(shrink(plan))
    assert printed.endswith(f"\n{found.value}\n")
    assert f"seed={plan.seed}," in printed
    assert 0 < printed.count("FAULT") < len(plan.faults)


def memory_only(seed: int) -> Plan:
    """A sound cluster that has just the memory it reserves, and no disk."""
    homes = [(0, 1), (0, 1, 2), (1, 2)][seed % 3]
    return Plan(
        seed=seed, nodes=3, homes=homes, k=1, window=1 + seed % 2, fold_every=1, places=0,
        slack=0.0, steps=10, step_s=(0.1, 0.7)[seed // 3 % 2],
    )  # fmt: skip


def test_the_reserve_is_enough() -> None:
    """Base, W+3 deltas and one incoming base: a sound run is not stuck for want of memory."""
    for seed in range(60):
        run(memory_only(seed))


def test_less_than_the_reserve_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two deltas less the watermark waits for records that there is no room for."""
    for module in (budget, histories):
        monkeypatch.setattr(module, "BEYOND_WINDOW", 1)
    with pytest.raises(Violation, match="deadlock"):
        all(run(memory_only(seed)) for seed in range(60))
