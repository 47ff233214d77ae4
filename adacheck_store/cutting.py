"""Cutting: folds of all parts of a chain, and of what comes out those pieces that are needed.

Each part is folded as it was written, only those windows that have something of it, and cut.
"""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adacheck_store.format.errors import ModelMismatchError
from adacheck_store.format.keys import rank_name
from adacheck_store.format.layout import Layout, Section, Slice

from .ahead import Ahead
from .arrays import byte_tensor, torch_dtype
from .fetch import Fetcher
from .fold import Fold, FoldReport
from .regions import Region, Span, overlap, regions_of
from .reshard import Copy, Held, Reshard, Wanted, reshard

Places = Mapping[tuple[str, int], tuple[Section, Slice]]
"""Where pieces are to lie: section and first element -> the same piece of other arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Arrays of another layout for what is cut out: ``places`` are those of a layout's pieces.

    Only what lies in ``spans`` of a section is wanted (None: all).
    """

    arrays: dict[str, torch.Tensor]
    places: Callable[[Layout], Places]
    spans: Mapping[str, Sequence[Span]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was cut out: how it is made up, its ``arrays`` (``<section>/<role>``, those of which
    something was copied, and those that were given), the ``reports`` of all parts that were read,
    and of these the ones that gave elements."""

    shard: Reshard
    arrays: dict[str, torch.Tensor]
    reports: Mapping[str, FoldReport]
    given: Sequence[FoldReport]


def cut_out(
    fetcher: Fetcher, folds: Mapping[str, Fold], need: Layout, *, rank: int, own: Wanted,
    bare: Collection[str], as_many: bool, to: Elsewhere | None = None,
) -> Cut:  # fmt: skip
    """The pieces of ``need`` from the folds of all parts, in order of preference.

    The rest is as for `reshard.reshard`, and so is what it raises. With ``to`` pieces go to
    arrays of another layout, and nothing is read for counters alone.
    """
    shard = reshard(
        need, {part: fold.layout for part, fold in folds.items()}, rank=rank_name(rank), own=own,
        alike=_tokens(folds), bare=bare, as_many=as_many,
    )  # fmt: skip
    sections: Mapping[str, Section] = {each.name: each for each in shard.layout.sections}
    arrays: dict[str, torch.Tensor] = {}
    if to is not None:
        sections, arrays = _lay(shard, to), to.arrays
    used = shard.parts or tuple(folds)[:1]
    given = []
    for part in used:
        spans = shard.spans(part)
        with Ahead(fetcher.parallel) as reader:
            folds[part].run(_Cutter(shard, sections, part, arrays), reader, spans)
        if any(spans.values()):
            given.append(folds[part].report)
    reports = {part: folds[part].report for part in used}
    return Cut(shard=shard, arrays=arrays, reports=reports, given=given)


def _lay(shard: Reshard, to: Elsewhere) -> Mapping[str, Section]:
    """Have the copies go elsewhere; the sections there, by name. No counters are given any more."""
    places = to.places(shard.layout)
    starts = {
        section.name: [piece.offset for piece in section.slices if piece.elements]
        for section in shard.layout.sections
    }
    copies = []
    for copy in shard.copies:
        begin = starts[copy.target]
        at = begin[bisect_right(begin, copy.targets[0].base) - 1]
        if (copy.target, at) not in places:
            continue  # nobody has it; what is left without it does not have its digest
        section, piece = places[copy.target, at]
        shift = piece.offset - at
        moved = [dataclasses.replace(each, base=each.base + shift) for each in copy.targets]
        if to.spans is not None:
            moved = list(_within(moved, piece, to.spans.get(section.name, ())))
        if moved:
            copies.append(dataclasses.replace(copy, target=section.name, targets=tuple(moved)))
    shard.copies = copies
    shard.givers = {(copy.target, at): [copy.source] for at, copy in enumerate(copies)}
    return {section.name: section for section, _ in places.values()}


def _within(
    targets: Sequence[Region], piece: Slice, spans: Sequence[Span]
) -> Iterator[Region]:  # fmt: skip
    """What of regions of a piece lies in spans of its section."""
    for low, high in spans:
        for wanted in regions_of(piece, low - piece.offset, high - piece.offset):
            for target in targets:
                both = overlap(target.box, wanted.box)
                if both is not None:
                    yield target.at(both)


class _Cutter:
    """A fold's sink that copies out of each window what is needed of it, and forgets the window.

    ``arrays`` are those of the state, ``<section>/<role>``, and ``sections`` their sections.
    """

    def __init__(
        self, shard: Reshard, sections: Mapping[str, Section], part: str,
        arrays: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self._sections = sections
        self._arrays = arrays
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in sorted(shard.copies, key=lambda copy: copy.source.piece.offset):
            if copy.source.part == part:
                self._copies[copy.source.section.name].append(copy)
        self._ends = {
            name: [copy.source.piece.offset + copy.source.piece.elements for copy in copies]
            for name, copies in self._copies.items()
        }

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Memory of the window's own: others are read meanwhile."""
        return torch.empty(stop - start, dtype=torch_dtype(section.dtypes[role]))

    def done(
        self, section: Section, start: int, stop: int, views: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy what lies in the window, or compare it with what a copy of it gave."""
        copies = self._copies.get(section.name, [])
        for copy in copies[bisect_right(self._ends.get(section.name, []), start) :]:
            if copy.source.piece.offset >= stop:
                break
            made = self._sections[copy.target]
            roles = [role for role in views if role in made.dtypes]
            for source, target in copy.moves(start, stop):
                for role in roles:
                    here = _view(views[role], source, start)
                    there = _view(array_of(self._arrays, made, role), target)
                    if not copy.check:
                        there.copy_(here)
                    elif not _same(here, there):
                        raise differs(copy.source)


def array_of(arrays: dict[str, torch.Tensor], section: Section, role: str) -> torch.Tensor:
    """A role's array of a section, made when first asked for."""
    key = f"{section.name}/{role}"
    if key not in arrays:
        arrays[key] = torch.zeros(section.elements, dtype=torch_dtype(section.dtypes[role]))
    return arrays[key]


def _view(array: torch.Tensor, region: Region, at: int = 0) -> torch.Tensor:
    """A region of an array whose first element is element ``at``."""
    return array.as_strided(region.sizes, region.strides, region.base - at)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(byte_tensor(one.contiguous()), byte_tensor(other.contiguous()))


def differs(held: Held) -> ModelMismatchError:
    """What each rank has of its own, this run needs one of, and is not the same on all."""
    return ModelMismatchError(
        f"{held.piece.name!r} is not the same on all ranks that wrote the chain, and this run "
        "needs one for them", part=held.part,
        hint="start as many ranks, sharded in the same way, as wrote it; nothing was changed",
    )  # fmt: skip


def _tokens(folds: Mapping[str, Fold]) -> dict[tuple[str, str], str]:
    """Of sections with tensors that each rank has of its own: a digest of all that is folded.

    Where two are equal, so is what folding them gives, for bases and deltas have the same bytes.
    """
    found = {}
    for part, fold in folds.items():
        for section in fold.layout.sections:
            if any(piece.scope for piece in section.slices):
                found[part, section.name] = _token(fold, section)
    return found


def _token(fold: Fold, section: Section) -> str:
    name = section.name
    bare = [dataclasses.replace(piece, scope="") for piece in section.slices]
    told: list[Any] = [section.optimizer, section.roles, bare, fold.base_step]
    told += [
        (role, info and info.digests)
        for role, _ in section.roles for info in [fold.base.info(f"{name}/{role}")]
    ]  # fmt: skip
    told.append(fold.base_body.states.get(name))
    for delta in fold.deltas:
        told += [
            (info.name, info.digests) for info in delta.reader.head.arrays
            if info.name.split("/")[1] == name
        ]  # fmt: skip
        told.append([entry for entry in delta.body.sets if entry.section == name])
        for update in delta.body.updates:
            told += [update.optimizer, update.groups]
            told.append([grad for grad in update.grads if grad.section == name])
            told.append([index for other, index in update.absent if other == name])
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
