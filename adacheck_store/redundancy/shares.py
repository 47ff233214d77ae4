"""Shares: which rank writes each state, so that each state is written once and each rank as much.

Every rank has one part: what it writes. A state that several ranks hold is in the part of one of
them, its owner; a state that one rank holds is in its own. Pure, the same for the same input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from adacheck_store.format import canonical, strict
from adacheck_store.format.errors import AdaCheckError, GroupError
from adacheck_store.format.keys import part_name
from adacheck_store.format.manifest import Manifest
from adacheck_store.format.rank_sets import ranks_of, runs_of
from adacheck_store.format.redundancy import Ground, Redundancy, decode_redundancy

from .assign import Assignment, Holder, Part, Policy, Topology
from .exchange import Ranks
from .revision import as_recorded
from .sighting import Piece
from .states import Keep, State
from .witness import ranks_holding

StateKey = tuple[str, str, Piece]
"""Scope, name and piece of a state."""

DIVERGED_MAX = 20
"""Copies that came apart of which each is told by name."""


def shares(
    states: Iterable[State], topology: Topology, *, owners: Mapping[StateKey, int] | None = None
) -> Assignment:
    """A part for each rank of the topology, with the states that the rank writes.

    ``owners`` are those of an earlier assignment: they stay where they still hold the state. Of
    other shared states the largest come first, each to the rank with the least so far. A part's
    sources are the ranks that hold all of it.
    """
    found = list(states)
    mine: dict[int, list[State]] = defaultdict(list)
    load = dict.fromkeys(sorted(topology.ranks), 0)
    open_: list[State] = []
    for state in found:
        owner = (owners or {}).get((state.scope, state.name, state.piece), -1)
        if len(state.copies) == 1:
            (owner,) = state.copies
        if owner not in state.copies:
            open_.append(state)
            continue
        mine[owner].append(state)
        load[owner] += state.nbytes
    for state in sorted(open_, key=lambda each: (-each.nbytes, each.name, each.scope)):
        owner = min(sorted(state.copies), key=lambda rank: load[rank])
        mine[owner].append(state)
        load[owner] += state.nbytes
    parts = tuple(_part(rank, mine[rank], topology) for rank in load)
    return Assignment(k=0, policy=Policy.AGENT, topology=topology, parts=parts)


def owners_of(found: Assignment) -> dict[StateKey, int]:
    """Who writes each state."""
    return {
        (state.scope, state.name, state.piece): part.owner
        for part in found.parts for state in part.states
    }  # fmt: skip


def _part(rank: int, states: list[State], topology: Topology) -> Part:
    sources: Ranks = frozenset(topology.ranks) if states else frozenset((rank,))
    for state in states:
        sources &= state.copies
    return Part(
        name=part_name(rank), sources=sources, owner=rank, states=tuple(states),
        holders=(Holder(node=topology.ranks[rank], source=rank, local=True),),
        kept=tuple(Keep.GRADIENT if each.optimizer else Keep.PARAMETER for each in states),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who writes what: a part for each rank, its ``sources``, and what a manifest says of them.

    ``diverged`` says which copies have come apart, in words.
    """

    sources: tuple[tuple[int, ...], ...]
    redundancy: Redundancy
    diverged: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Assignment, agreed: int, diverged: tuple[str, ...] = ()) -> Sharing:
        """Of shares; all copies there were before were equal at step ``agreed``."""
        return cls(
            sources=tuple(tuple(sorted(part.sources)) for part in found.parts),
            redundancy=as_recorded(found, agreed),
            diverged=tuple(text[: strict.MAX_TEXT] for text in diverged[:DIVERGED_MAX]),
        )

    def encode(self) -> bytes:
        """As JSON; `decode_sharing` is the inverse."""
        sources = [runs_of(ranks) for ranks in self.sources]
        return canonical.dumps(
            {"sources": sources, "redundancy": self.redundancy.to_json(),
             "diverged": list(self.diverged)}
        )  # fmt: skip

    def alike(self, other: Sharing) -> bool:
        """Whether both say the same, whenever it was found."""
        agreed = other.redundancy.agreed
        return self.sources == other.sources and (
            replace(self.redundancy, agreed=agreed) == other.redundancy
        )

    def written_by(self, rank: int) -> dict[str, str]:
        """The names of the states that a rank writes, with their scopes."""
        found = self.redundancy
        pairs = found.parts[rank].pairs()
        return {found.names[name]: found.grounds[ground].scope for name, ground in pairs}

    def __str__(self) -> str:
        found = self.redundancy
        held = [each for part in found.parts for each in part.pairs()]
        both = [len(ranks_holding(found, found.grounds[ground])) > 1 for _, ground in held]
        either = [_widest(found, found.grounds[ground]) > 1 for _, ground in held]
        shared, more = sum(both), sum(either) - sum(both)
        partly = f"; {more} more have of their parameter or optimizer alone" if more else ""
        unproven = Counter(found.grounds[ground].why for _, ground in held)
        unproven.pop("", None)
        doubts = "".join(f"; {n} unproven ({why})" for why, n in sorted(unproven.items()))
        apart = "".join(f"; {text}" for text in self.diverged)
        return (
            f"as of step {found.agreed}, {shared} of {len(held)} states have copies on several "
            f"ranks and are kept once{partly}{doubts}{apart}"
        )


def decode_sharing(data: bytes) -> Sharing:
    """From JSON; raises `GroupError` for anything else."""
    try:
        said = strict.fields(canonical.loads(data), "sources", "redundancy", "diverged")
        sources = tuple(ranks_of(strict.items(runs)) for runs in strict.items(said["sources"]))
        return Sharing(
            sources=sources, redundancy=decode_redundancy(said["redundancy"], sources),
            diverged=tuple(strict.text(text) for text in strict.items(said["diverged"])),
        )  # fmt: skip
    except (AdaCheckError, ValueError, TypeError) as error:
        raise GroupError(f"rank 0 sent no assignment: {error}"[:400]) from error


def _widest(found: Redundancy, ground: Ground) -> int:
    """On how many ranks the parameter is, or what its optimizer keeps, whichever is on more."""
    sides = [found.sets[side] for side in (ground.param, ground.optimizer) if side >= 0]
    return max(len(ranks_of(runs)) for runs in sides)


def wanted_of(manifest: Manifest, rank: int) -> Mapping[str, Mapping[tuple[str, str], bool]]:
    """What a rank held under a revision: part -> scope and name -> whether all of the state.

    Of a state whose parameter it held without the optimizer's state (ZeRO-1) it wants the parameter
    alone. Its own part is always among them. Empty where the revision says nothing of redundancy:
    there every rank has all that it holds in its own part.
    """
    found = manifest.redundancy
    if found is None:
        return {}
    whole = [rank in ranks_holding(found, ground) for ground in found.grounds]
    param = [
        ground.param >= 0 and rank in ranks_of(found.sets[ground.param]) for ground in found.grounds
    ]
    mine: dict[str, tuple[str, tuple[str, str], bool]] = {}
    for entry, part in zip(manifest.parts, found.parts, strict=True):
        for name, ground in part.pairs():
            if whole[ground] or (param[ground] and found.names[name] not in mine):
                place = found.grounds[ground].scope, found.names[name]
                mine[found.names[name]] = entry.name, place, whole[ground]
    wanted: dict[str, dict[tuple[str, str], bool]] = {part_name(rank): {}}
    for part_of, place, all_of_it in mine.values():
        wanted.setdefault(part_of, {})[place] = all_of_it
    return wanted
