"""``python -m tests.sim FIRST [COUNT]``: run histories; one alone is told line by line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace

from tests.sim.histories import Plan, make_plan, run


def shrink(plan: Plan) -> Plan:
    """A plan with as few faults and probes as still fail."""
    for name in ("faults", "probes"):
        for item in list(getattr(plan, name)):
            less = replace(plan, **{name: tuple(x for x in getattr(plan, name) if x is not item)})
            try:
                run(less)
            except AssertionError:
                plan = less
    return plan


def tell(plan: Plan) -> int:
    """Run one history, shrunk if it fails, and print it."""
    try:
        run(plan)
    except AssertionError:
        plan = shrink(plan)
    trace: list[str] = []
    print(plan)
    try:
        print(run(plan, trace))
    except AssertionError as error:
        print("\n".join(trace))
        print(error)
        return 1
    print("\n".join(trace))
    return 0


def main(first: int, count: int) -> int:
    """Run ``count`` histories from a seed on; prints what fails, and sums."""
    began, failed = time.process_time(), 0
    sums: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            outcome = run(make_plan(seed))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        sums.update(
            steps=outcome.steps, restores=outcome.restores, promises=outcome.promises,
            drained=outcome.drained, floors=outcome.floors,
            virtual_s=int(outcome.seconds),
        )  # fmt: skip
        sums.update(outcome.faults)
        sums.update(outcome.seen)
    took = time.process_time() - began
    print(f"{count} histories in {took:.1f} s of CPU, {failed} failed; {dict(sums)}")
    return 1 if failed else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(tell(make_plan(numbers[0])) if len(numbers) == 1 else main(numbers[0], numbers[1]))
