"""Revisions: an assignment as the manifest says it, for all ranks and all who restore later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeVar

from adacheck_store.format.manifest import Manifest, PartEntry
from adacheck_store.format.rank_sets import runs_of
from adacheck_store.format.redundancy import Ground, HeldPart, Redundancy

from .assign import Assignment, Part
from .exchange import Ranks
from .states import Keep, State, degree

T = TypeVar("T")


def revise(
    manifest: Manifest, found: Assignment, layouts: Mapping[str, str], *, step: int, agreed: int
) -> Manifest:
    """The revision after ``manifest``, from ``step`` on: these parts, with their layouts' ids.

    ``agreed`` is the newest step at which all copies were compared and equal.
    """
    parts = tuple(
        PartEntry(
            name=part.name, layout=layouts[part.name], sources=tuple(sorted(part.sources)),
            owner=part.owner,
        )
        for part in found.parts
    )  # fmt: skip
    return dataclasses.replace(
        manifest, step=step, previous=manifest.seal().id, parts=parts,
        redundancy=as_recorded(found, agreed),
    )  # fmt: skip


def as_recorded(found: Assignment, agreed: int) -> Redundancy:
    """An assignment as tables; its parts are in the order of their names."""
    where = found.topology
    nodes = sorted(where.domain)
    node_at = {node: index for index, node in enumerate(nodes)}
    tables = _Tables(found)
    size = len(where.ranks)
    return Redundancy(
        k=found.k,
        policy=found.policy.value,
        agreed=agreed,
        nodes=tuple((node, where.domain[node]) for node in nodes),
        ranks=tuple(node_at[where.ranks[rank]] for rank in range(size)),
        sets=tuple(tables.sets),
        names=tuple(tables.names),
        grounds=tuple(tables.grounds),
        parts=tuple(
            HeldPart(
                degree=degree(part.sources, size).value,
                holders=tuple((node_at[h.node], h.source) for h in part.holders),
                states=tables.states(part),
            )
            for part in found.parts
        ),
    )


class _Tables:
    """Tables of everything that parts refer to, and where in them each thing stands."""

    def __init__(self, found: Assignment) -> None:
        known: set[_Known] = set()
        names: set[str] = set()
        for part in found.parts:
            for state, kept in zip(part.states, part.kept, strict=True):
                known.add(_known(state, kept))
                names.add(state.name)
        sides = {side for _, *both, _, _ in known for side in both if side}
        runs = {side: tuple(runs_of(side)) for side in sides}
        self.sets, set_at = _table(runs.values())
        self._set_at: dict[Ranks, int] = {side: set_at[runs[side]] for side in sides}
        self.names, self._name_at = _table(names)
        made = {each: self._ground(*each) for each in known}
        self.grounds, ground_at = _table(made.values())
        self._ground_at = {each: ground_at[ground] for each, ground in made.items()}

    def _ground(self, scope: str, param: Ranks, optimizer: Ranks, kept: Keep, why: str) -> Ground:
        return Ground(
            scope=scope, param=self._set_at.get(param, -1),
            optimizer=self._set_at.get(optimizer, -1), keep=kept.value, why=why,
        )  # fmt: skip

    def states(self, part: Part) -> tuple[int, ...]:
        """A part's states as indexes."""
        pairs = sorted(
            (self._name_at[state.name], self._ground_at[_known(state, kept)])
            for state, kept in zip(part.states, part.kept, strict=True)
        )
        return tuple(index for pair in pairs for index in pair)


_Known = tuple[str, Ranks, Ranks, Keep, str]


def _known(state: State, kept: Keep) -> _Known:
    return state.scope, state.param, state.optimizer, kept, state.why


def _table(values: Iterable[T]) -> tuple[list[T], dict[T, int]]:
    """Distinct values in order, and where each stands."""
    order = sorted(set(values))  # type: ignore[type-var]
    return order, {value: index for index, value in enumerate(order)}
