"""Another topology: what a rank needs is put together from what all ranks of a chain have written.

Each part is folded as it was written, only those windows that have something of it, and cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.bodies import SectionState, decode_extra
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.errors import ModelMismatchError
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.layout import Layout

from .cutting import array_of, cut_out, differs
from .fetch import ArrayReader, Fetcher, lost_if_malformed
from .fold import FoldReport
from .reading import open_fold, read_extra
from .recovery import RestorePlan
from .reshard import Reshard, Wanted, same_pieces
from .state import PartState


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a rank needs of a chain: which rank of how many it is, and the pieces it holds.

    Without a ``layout`` that is what the same rank has written. ``bare`` names parameters that
    other ranks have the optimizer's state of.
    """

    rank: int
    ranks: int
    layout: Layout | None = None
    bare: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutTogether:
    """A state that was put together: ``plan`` has the parts that were read, ``reports`` are those
    of the folds that gave elements, ``taken`` as in `reshard.Reshard`."""

    state: PartState
    plan: RestorePlan
    reports: Sequence[FoldReport]
    taken: Sequence[str]


def only(plan: RestorePlan, parts: Collection[str], ranks: Collection[str]) -> RestorePlan:
    """A plan of some parts, and the extras of some ranks."""
    return dataclasses.replace(
        plan, parts=tuple(item for item in plan.parts if item.part in parts),
        extras={name: refs for name, refs in plan.extras.items() if name in ranks},
    )  # fmt: skip


def is_another(
    plan: RestorePlan, layouts: Mapping[str, Layout], need: Need, wanted: Wanted
) -> bool:  # fmt: skip
    """Whether a rank holds other pieces than the same rank of the chain, or there was none.

    ``layouts`` are those of the parts that have what it held: what of them, where they are shared,
    ``wanted`` says. Raises `ModelMismatchError` where nobody has told what is needed.
    """
    ranks = len(plan.manifest.ranks)
    if need.layout is None:
        if ranks != need.ranks:
            raise ModelMismatchError(
                f"the chain was written by {ranks} rank{'s' * (ranks > 1)}, this run has "
                f"{need.ranks}", run=plan.run, term=plan.term, step=plan.step,
                hint="say which pieces each rank needs; nothing was changed",
            )  # fmt: skip
        return False
    held = []
    for part, layout in layouts.items():
        for section in layout.sections:
            for piece in section.slices:
                place = piece.scope, piece.name
                if not wanted or place in wanted[part]:
                    state = not wanted or wanted[part][place]
                    held.append((piece, state and section.optimizer >= 0))
    return ranks != need.ranks or not same_pieces(need.layout, held)


def put_together(
    fetcher: Fetcher, plan: RestorePlan, layouts: Mapping[str, Layout], need: Need, wanted: Wanted
) -> PutTogether:
    """The state that a rank needs, as that of its part; see `reshard.reshard`.

    Raises `ModelMismatchError` where it cannot be: pieces are missing, or tensors of which each
    rank has its own are not equal.
    """
    assert need.layout is not None
    at = need.rank % len(plan.parts)
    order = [*plan.parts[at:], *plan.parts[:at]]
    made = cut_out(
        fetcher, {item.part: open_fold(fetcher, layouts[item.part], item) for item in order},
        need.layout, rank=need.rank, own=wanted, bare=need.bare,
        as_many=len(plan.manifest.ranks) == need.ranks,
    )  # fmt: skip
    shard, arrays = made.shard, made.arrays
    reports = made.reports
    states = _states(shard, reports)
    for section in shard.layout.sections:  # also where nothing was copied
        roles = section.state_roles if any(states[section.name].present) else ()
        for role in (section.main_role, *roles):
            array_of(arrays, section, role)
    state = PartState(
        part=part_name(need.rank), step=plan.step, layout=shard.layout, layout_id="",
        arrays=arrays, states=states, boundary=_boundary(reports),
    )  # fmt: skip
    return PutTogether(
        state=state, plan=only(plan, reports, plan.extras), taken=shard.taken,
        reports=made.given or list(reports.values()),
    )  # fmt: skip


def _states(shard: Reshard, reports: Mapping[str, FoldReport]) -> dict[str, SectionState]:
    """Which slices have optimizer state, and their counters; all who give a slice must agree."""
    found = {}
    for section in shard.layout.sections:
        rows: list[tuple[bool, dict[str, Any]]] = []
        for index in range(len(section.slices)):
            if section.optimizer < 0:
                rows.append((False, {}))
                continue
            told = [
                (state.present[held.index],
                 {name: values[held.index] for name, values in state.scalars.items()})
                for held in shard.givers[section.name, index]
                for state in [reports[held.part].states[held.section.name]]
            ]  # fmt: skip
            if any(each != told[0] for each in told[1:]):
                raise differs(shard.givers[section.name, index][0])
            rows.append(told[0])
        names = sorted({name for _, scalars in rows for name in scalars})
        found[section.name] = SectionState(
            present=tuple(present for present, _ in rows),
            scalars={name: tuple(scalars.get(name) for _, scalars in rows) for name in names},
        )
    return found


def _boundary(reports: Mapping[str, FoldReport]) -> Any:
    """The groups' hyper-parameters, which all parts must have alike."""
    found = list(reports.values())
    if any(report.boundary != found[0].boundary for report in found[1:]):
        raise ModelMismatchError(
            f"parts {', '.join(reports)} have other hyper-parameters, and this run needs one for "
            "all", hint="start as many ranks, sharded in the same way, as wrote the chain",
        )  # fmt: skip
    return found[0].boundary


def adopt(
    fetcher: Fetcher, plan: RestorePlan, need: Need, taken: Sequence[str]
) -> tuple[dict[str, Any], frozenset[str] | None, str]:
    """A rank's extra, or the first rank's where it was not among those that wrote the chain.

    Then also what of it all had alike (else None); and in words who has what of whom.
    """
    ranks, name = plan.manifest.ranks, rank_name(need.rank)
    said = [f"written by {len(ranks)} rank{'s' * (len(ranks) > 1)}, restored on {need.ranks}"]
    if taken:
        said.append(f"each rank had its own {', '.join(taken[:5])}: rank 0's are taken")
    if name in plan.extras:
        tree = read_extra(fetcher, plan.extras[name])
        said.append("generators and loader are this rank's own")
        return tree, None, "; ".join(said)
    tree = read_extra(fetcher, plan.extras[ranks[0]])
    told = [_spelled(fetcher, plan, other) for other in ranks]
    alike = frozenset(
        key for key in tree if all(each.get(key) == told[0].get(key) for each in told)
    )
    others = sorted(tree.keys() - alike - {"rng"})
    said.append(
        f"rank {need.rank} was not among them: its generators stay as they are"
        + (f", and its {', '.join(others)} is what rank 0 had" if others else "")
    )
    return tree, alike, "; ".join(said)


def _spelled(fetcher: Fetcher, plan: RestorePlan, rank: str) -> dict[str, str]:
    """A rank's extra as text that two ranks have alike if the values are."""
    found: dict[str, str] = {}
    for ref in reversed(plan.extras[rank]):
        reader = ArrayReader(fetcher, ref)
        with lost_if_malformed(ref):
            tree = decode_extra(reader.head).tree
        for key, value in tree.items():
            found[key] = repr(_bare(value, reader))
    return found


def _bare(value: Any, reader: ArrayReader) -> Any:
    """A typed value with digests in the place of arrays."""
    if isinstance(value, ArrayRef):
        return value.dtype, value.shape, reader.head.array(value.array).digests
    if isinstance(value, tuple | list):
        return [_bare(item, reader) for item in value]
    if isinstance(value, dict):
        return {key: _bare(item, reader) for key, item in value.items()}
    return value
