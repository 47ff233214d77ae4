"""What really happened in a history, and the invariants that every restore must keep.

A part's state is a value; a delta leads from one value to the next. So a plan can be carried out
symbolically, and what comes out is compared with what the trainer had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from adacheck_store.catalog import Catalog, RecordRef, gaps_of
from adacheck_store.format.errors import NotProvableError
from adacheck_store.format.manifest import Floor, Manifest
from adacheck_store.recovery import RestorePlan, plan_restore

RUN = "run"

Life = tuple[str, str]
"""An agent between two starts: node and boot."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A step that all ranks were told k+1 holders have; ``holders`` by chain number."""

    term: str
    step: int
    holders: Mapping[int, frozenset[Life]]


@dataclass
class Truth:
    """What trainers had, what records hold, what was promised."""

    ranks: int
    manifests: dict[str, Manifest] = field(default_factory=dict)
    values: dict[tuple[str, str, int], object] = field(default_factory=dict)
    """(term, part, step) -> the value that the trainer had."""
    holds: dict[str, object] = field(default_factory=dict)
    """Id of a base -> its value."""
    edges: dict[str, tuple[object, object]] = field(default_factory=dict)
    """Id of a delta -> values before and after."""
    promises: list[Promise] = field(default_factory=list)
    drained: dict[str, dict[int, set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    """Term -> rank -> steps that it was told the far tier has."""
    count: int = 0
    """How often something had been told to be drained when it was looked for."""
    _acked: dict[tuple[str, int], dict[int, frozenset[Life]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _planned: tuple[Catalog, RestorePlan | None] | None = None

    def acknowledged(self, term: str, step: int, rank: int, holders: Iterable[Life]) -> None:
        """A rank was told that k+1 holders can produce its step."""
        found = self._acked[term, step]
        found[rank] = frozenset(holders)
        if len(found) == self.ranks:
            self.promises.append(Promise(term, step, found))

    def reseated(self, term: str, number: int, nodes: Sequence[str], agreed: int) -> None:
        """A chain has k+1 holders, and all chains' have had a step ``agreed``.

        Whoever held an older one and lost its seat to them answers for that no more, nor does it
        where a later term seats it again: what it then lacks is on its way to it.
        """
        for (of, step), found in self._acked.items():
            if of <= term and step < agreed and number in found:
                found[number] = frozenset(life for life in found[number] if life[0] in nodes)

    def check_drained(self, catalog: Catalog, why: str) -> None:
        """Of the line, what all ranks were told is drained comes back, whatever else is there."""
        if not self.drained:
            return
        line = _line(catalog)
        told = {
            step for term, ranks in self.drained.items() if len(ranks) == self.ranks
            for step in set.intersection(*ranks.values()) if step <= line.get(term, -1)
        }  # fmt: skip
        if not told:
            return
        self.count += 1
        plan = self.plan(catalog)
        reached = -1 if plan is None else plan.step
        if reached < max(told):
            raise Violation(f"{why}: told {sorted(told)} drained, there is {reached}")

    def plan(self, catalog: Catalog) -> RestorePlan | None:
        """The product's plan of a restore, None if nothing can be proven; the last is kept."""
        if self._planned is None or self._planned[0] is not catalog:
            try:
                plan: RestorePlan | None = plan_restore(catalog)
            except NotProvableError:
                plan = None
            self._planned = catalog, plan
        return self._planned[1]

    def check_floors(self, catalog: Catalog, floors: Iterable[Floor], why: str) -> None:
        """No step that can be restored is below a floor of the line: the far tier proves it."""
        line = _line(catalog)
        floor = max((floor.step for floor in floors if floor.term in line), default=-1)
        if floor >= 0 and ((plan := self.plan(catalog)) is None or plan.step < floor):
            raise Violation(f"{why}: the floor is {floor}, there is {plan.step if plan else -1}")

    def fold(self, base: RecordRef, deltas: Iterable[RecordRef]) -> object:
        """The value that a fold gives; a fold of records that do not fit is a violation."""
        value = self.holds[base.id]
        for ref in deltas:
            before, after = self.edges[ref.id]
            if before != value:
                raise Violation(f"{ref.key} ({before}) is folded into {value}")
            value = after
        return value

    def catalog(
        self, stores: Iterable[tuple[str, Mapping[str, RecordRef]]],
        lost: Collection[tuple[str, str]] = (),
    ) -> Catalog:  # fmt: skip
        """The catalog of some stores, by name, without what is lost: (store, key).

        The head of what is lost there stays true: see `Catalog.without`.
        """
        refs: dict[str, RecordRef] = {}
        told: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}
        for name, store in stores:
            if not lost:
                refs.update(store)
                continue
            for key, ref in store.items():
                if (name, key) not in lost:
                    refs[key] = ref
                elif ref.gap is not None:
                    place = ref.term, ref.part
                    told[place] = told.get(place, ()) + gaps_of((ref,), None).spans
        tables: dict[str, dict[tuple[str, str], list[RecordRef]]] = {
            "base": {}, "delta": {}, "extra": {}
        }  # fmt: skip
        for ref in refs.values():
            tables[ref.kind].setdefault((ref.term, ref.part), []).append(ref)
        return Catalog(
            run=RUN, manifests=dict(self.manifests), layouts={"layout": ("log",)},
            bases={place: tuple(found) for place, found in tables["base"].items()},
            deltas={place: tuple(found) for place, found in tables["delta"].items()},
            extras={place: tuple(found) for place, found in tables["extra"].items()},
            gap_spans=told,
        )  # fmt: skip

    def check(
        self, catalog: Catalog, lives: set[Life], seated: Mapping[int, frozenset[str]],
        promises: list[Promise], why: str,
    ) -> RestorePlan | None:  # fmt: skip
        """Plan a restore from what survives, and hold it against the truth.

        ``lives`` are the agents that survive since they acknowledged, ``seated`` the nodes that
        still have a seat, by chain number.
        """
        plan = self.plan(catalog)
        if plan is not None:
            self._carry_out(plan)
        reached = plan.step if plan is not None else -1
        line = _line(catalog)
        for promise in reversed(promises):
            if promise.step <= reached or promise.step > line.get(promise.term, -1):
                continue
            if all(
                any(life in lives and life[0] in seated[number] for life in holders)
                for number, holders in promise.holders.items()
            ):
                raise Violation(
                    f"{why}: step {promise.step} of {promise.term} was acknowledged by "
                    f"{_named(promise)}, {sorted(lives)} survive, restored is {reached}"
                )
        return plan

    def _carry_out(self, plan: RestorePlan) -> None:
        """Nothing is invented, and all parts and extras are of one step of one line."""
        for part in plan.parts:
            value = self.fold(part.base, part.deltas)
            true = self.values[plan.term, part.part, plan.step]
            if value != true:
                raise Violation(f"{part.part} is restored as {value}, the trainer had {true}")
        for rank, refs in plan.extras.items():
            if refs[0].step != plan.step or refs[0].part != rank:
                raise Violation(f"the extra of {rank} is of step {refs[0].step}")


def _named(promise: Promise) -> str:
    return "; ".join(f"{n}: {sorted(lives)}" for n, lives in sorted(promise.holders.items()))


def _line(catalog: Catalog) -> dict[str, int]:
    """Terms of the line, each with the last step that belongs to it."""
    by_term = {manifest.term: manifest for manifest in catalog.manifests.values()}
    line: dict[str, int] = {}
    term, last = max(by_term, default=""), 10**9
    while term in by_term:
        line[term] = last
        last, term = by_term[term].fork_step, by_term[term].parent_term
    return line
