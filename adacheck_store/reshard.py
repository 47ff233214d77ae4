"""Resharding: which pieces of which parts make up what a rank needs. Pure; heads are all it knows.

Optimizers that are folded work element by element. So a part is replayed as it was written, in
windows of whole blocks, those alone that have something of what is needed; and what comes out is
copied to where it is needed, box by box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import ModelMismatchError
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.layout import Layout, Section, Slice, align

from .regions import Box, Region, Span, less, merged, overlap, regions_of

PROBLEMS_SHOWN = 20

Wanted = Mapping[str, Mapping[tuple[str, str], bool]]
"""What a rank held: part -> scopes and names -> whether all of it (`shares.wanted_of`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A slice of a part: where it lies there."""

    part: str
    section: Section
    index: int

    @property
    def piece(self) -> Slice:
        """The slice."""
        return self.section.slices[self.index]

    @property
    def place(self) -> tuple[str, str, int]:
        """What tells it from all others."""
        return self.part, self.section.name, self.index


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a slice that belong at ``targets`` in arrays of the section ``target``.

    With ``check`` they are there already, from a copy, and must be the same.
    """

    source: Held
    target: str
    targets: tuple[Region, ...]
    check: bool = False

    def moves(self, start: int, stop: int) -> Iterator[tuple[Region, Region]]:
        """Of elements ``start..stop`` of the source's section: where each lies and belongs."""
        piece = self.source.piece
        for region in regions_of(piece, start - piece.offset, stop - piece.offset):
            for target in self.targets:
                both = overlap(region.box, target.box)
                if both is not None:
                    yield region.at(both), target.at(both)

    def needed(self) -> Iterator[Span]:
        """What is to be folded of the source's section, in whole blocks."""
        unit = unit_of(self.source.section)
        for region, _ in self.moves(0, self.source.section.elements):
            yield from region.touched(unit)


@dataclass(slots=True)
class Reshard:
    """How what a rank needs is made up.

    ``layout`` has the tensors as the chain has them (dtypes, groups, names), cut as they are
    needed; ``copies`` say what goes where in its arrays, ``givers`` whose counters each of its
    slices has, by section and index. ``order`` has all parts, those preferred first. ``taken``
    names buffers of which each rank had its own, and that are the first rank's here.
    """

    layout: Layout
    order: tuple[str, ...]
    copies: list[Copy] = field(default_factory=list)
    givers: dict[tuple[str, int], list[Held]] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts to be read, also those that give counters alone; copies come after what they are
        compared with."""
        given = {held.part for givers in self.givers.values() for held in givers}
        return tuple(part for part in self.order if part in given)

    def spans(self, part: str) -> dict[str, tuple[Span, ...]]:
        """Section -> elements to be folded: empty where counters alone are wanted."""
        found: dict[str, list[Span]] = {}
        for givers in self.givers.values():
            for held in givers:
                if held.part == part:
                    found.setdefault(held.section.name, [])
        for copy in self.copies:
            if copy.source.part == part:
                spans = found.setdefault(copy.source.section.name, [])
                spans += copy.needed()
        return {name: merged(spans) for name, spans in found.items()}


def unit_of(section: Section) -> int:
    """Elements of a block of the section's widest role: nothing smaller is read of it."""
    return BLOCK_BYTES // max(item_bytes(dtype) for _, dtype in section.roles)


def same_pieces(need: Layout, held: Iterable[tuple[Slice, bool]]) -> bool:
    """Whether tensors of one name are the same pieces in both (a scope is not looked at), and have
    an optimizer in both or in none: that is told of each that is ``held``."""
    found = {name: each for each in held for name in names_of(each[0])}
    for section in need.sections:
        for piece in section.slices:
            other = found.get(next((name for name in names_of(piece) if name in found), ""))
            if other is None:
                continue
            cut, trained = other
            if piece.shape != cut.shape or not _equal_cut(piece, cut):
                return False
            if trained != (section.optimizer >= 0):
                return False
    return True


def pieces_in(layout: Layout) -> Iterator[Slice]:
    """All slices of a layout."""
    return (piece for section in layout.sections for piece in section.slices)


def names_of(piece: Slice) -> tuple[str, ...]:
    """A slice's name, and those that are tied to it."""
    return (piece.name, *piece.aliases)


def reshard(
    need: Layout, parts: Mapping[str, Layout], *, rank: str, own: Wanted,
    alike: Mapping[tuple[str, str], str], bare: Collection[str] = (), as_many: bool = True,
) -> Reshard:  # fmt: skip
    """How ``need`` is made up of what all ``parts`` of a chain hold at a step.

    ``parts`` are in order of preference. A tensor without scope may come from any of them. One that
    each rank has of its own goes to the same rank: by its scope, or, where shared copies are kept
    once, by what ``own`` says that rank held. For another rank, where it is to be cut, and where
    there are not ``as_many`` ranks as wrote the chain (what a rank alone had may then be nobody's),
    what several ranks have of it must be equal: proven by equal tokens in ``alike`` (by part and
    section), else to be compared. Of a buffer, which DDP broadcasts, the first rank's is taken, and
    of a parameter that an optimizer has on some ranks alone (ZeRO-1) theirs. Parameters in ``bare``
    are needed without the optimizer's state.

    Raises `ModelMismatchError` naming the tensors that cannot be made up. What is in the chain and
    not needed has no elements in the layout; what is needed and not in the chain is not there.
    """
    return _Planner(need, parts, rank, own, alike, bare, as_many).plan()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A piece that is needed, slices that may give it, and those that must be equal to it."""

    piece: Slice
    sources: Sequence[Held]
    rivals: Sequence[Held] = ()
    bare: bool = False

    @property
    def kind(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """What tensors of one section have in common: their optimizer, and their roles."""
        section = self.sources[0].section
        return (-1, section.roles[:1]) if self.bare else (section.optimizer, section.roles)


class _Planner:
    """Finds for slice after slice what it is made of."""

    def __init__(
        self, need: Layout, parts: Mapping[str, Layout], rank: str, own: Wanted,
        alike: Mapping[tuple[str, str], str], bare: Collection[str], as_many: bool,
    ) -> None:  # fmt: skip
        self._need, self._parts, self._bare = need, parts, bare
        self._rank, self._own, self._alike, self._as_many = rank, own, alike, as_many
        self._named: dict[str, list[Held]] = defaultdict(list)
        for part, layout in parts.items():
            for section in layout.sections:
                for index, piece in enumerate(section.slices):
                    for name in names_of(piece):
                        self._named[name].append(Held(part, section, index))
        self._wrong: list[str] = []
        self._taken: list[str] = []

    def plan(self) -> Reshard:
        """The whole."""
        seen: set[str] = set()
        tensors: list[_Tensor] = []
        for piece in pieces_in(self._need):
            name = next((name for name in names_of(piece) if name in self._named), "")
            if name:
                found = self._named[name]
                seen.update(other for held in found for other in names_of(held.piece))
                tensors.append(self._chosen(piece, found))
        for name, found in self._named.items():
            left = [held for held in found if self._expected(held)]
            if name not in seen and left and name == left[0].piece.name:
                tensors.append(_nothing(left[0]))
        result = self._laid_out(tensors)
        if self._wrong:
            more = len(self._wrong) - PROBLEMS_SHOWN
            raise ModelMismatchError(
                "this state cannot be put together for this run: "
                + "; ".join(self._wrong[:PROBLEMS_SHOWN]) + (f"; and {more} more" * (more > 0)),
                hint=f"start as many ranks as wrote the chain ({len(self._parts)}), sharded in the "
                "same way; nothing was changed",
            )  # fmt: skip
        return result

    def _chosen(self, piece: Slice, found: list[Held]) -> _Tensor:
        """Which of the slices of a name give the piece."""
        if piece.shape != found[0].piece.shape:
            return _nothing(found[0])  # whoever compares names both sides
        found = [held for held in found if held.section.optimizer >= 0] or found
        bare = piece.name in self._bare
        free = [held for held in found if not held.piece.scope]
        mine = [held for held in found if self._is_mine(held) and _equal_cut(held.piece, piece)]
        if free or (mine and piece.scope and self._as_many):
            return self._checked(_Tensor(piece, free or mine, bare=bare))
        if found[0].section.main_role == "buffer":
            first = min(found, key=lambda held: held.piece.scope)
            if not all(self._equal(first, held) for held in found):
                self._taken.append(piece.name)
            return _Tensor(piece, [first])
        rivals = [
            held for number, held in enumerate(found)
            if number and not any(self._equal(other, held) for other in found[:number])
        ]  # fmt: skip
        return self._checked(_Tensor(piece, found, rivals, bare))

    def _is_mine(self, held: Held) -> bool:
        if self._own:
            return (held.piece.scope, held.piece.name) in self._own.get(held.part, ())
        return held.piece.scope == self._rank

    def _expected(self, held: Held) -> bool:
        """Whether a rank that does not need a tensor has another model than the chain."""
        return self._is_mine(held) or (not self._own and not held.piece.scope)

    def _equal(self, one: Held, other: Held) -> bool:
        token = self._alike.get((one.part, one.section.name))
        same = token is not None and token == self._alike.get((other.part, other.section.name))
        return one.place == other.place or (same and one.index == other.index)

    def _checked(self, tensor: _Tensor) -> _Tensor:
        """The tensor; ranks that differ in its shape, dtypes or group are named."""
        found = tensor.sources
        kinds = {
            (each.section.optimizer, each.section.roles, each.piece.group, each.piece.shape)
            for each in found
        }
        if len(kinds) > 1:
            self._wrong.append(f"{tensor.piece.name!r} is not the same on all: {_listed(found)}")
            return _nothing(found[0])
        return tensor

    def _laid_out(self, tensors: Sequence[_Tensor]) -> Reshard:
        """A section for each kind of tensor, and in it the pieces one after another."""
        by_kind: dict[object, list[_Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_kind[tensor.kind].append(tensor)
        optimizers = max((each.optimizers for each in self._parts.values()), key=len, default=())
        result = Reshard(
            Layout(optimizers=optimizers, sections=()), tuple(self._parts), taken=self._taken
        )
        sections: list[Section] = []
        for alike in by_kind.values():
            offset, slices = 0, []
            optimizer, roles = alike[0].kind
            section = Section(name=f"s{len(sections)}", optimizer=optimizer, roles=roles, slices=())
            for index, tensor in enumerate(alike):
                first = tensor.sources[0].piece
                piece = replace(
                    tensor.piece, name=first.name, aliases=first.aliases, scope="", offset=offset,
                    group=-1 if tensor.bare else first.group,
                )  # fmt: skip
                slices.append(piece)
                offset = align(offset + piece.elements)
                copies = self._cover(piece, section.name, tensor)
                result.copies += copies
                result.givers[section.name, index] = [copy.source for copy in copies]
            sections.append(replace(section, slices=tuple(slices)))
        result.layout = replace(result.layout, sections=tuple(sections))
        used = set(result.parts)
        for section, alike in zip(sections, by_kind.values(), strict=True):
            for index, tensor in enumerate(alike):  # without elements anyone knows its counters
                near = [held for held in tensor.sources if held.part in used]
                given = result.givers[section.name, index]
                result.givers[section.name, index] = given or (near or list(tensor.sources))[:1]
        return result

    def _cover(self, piece: Slice, target: str, tensor: _Tensor) -> list[Copy]:
        """Copies that give each element of a piece once; then those that must agree with them."""
        regions = regions_of(piece)
        left = [(region, region.box) for region in regions]
        copies: list[Copy] = []
        for each in tensor.sources if left else ():
            left, given = _take(left, each.piece)
            if given:
                copies.append(Copy(each, target, tuple(given)))
        if left:
            self._wrong.append(f"of {piece.name!r} there is only {_listed(tensor.sources)}")
        for rival in tensor.rivals:
            _, given = _take([(region, region.box) for region in regions], rival.piece)
            if given:
                copies.append(Copy(rival, target, tuple(given), check=True))
        return copies


def _equal_cut(one: Slice, other: Slice) -> bool:
    return (one.boxes, one.flat) == (other.boxes, other.flat)


def _nothing(held: Held) -> _Tensor:
    """A tensor of the chain without elements."""
    return _Tensor(replace(held.piece, boxes=(), flat=None), [held])


_Left = list[tuple[Region, Box]]


def _take(left: _Left, piece: Slice) -> tuple[_Left, list[Region]]:
    """What a slice does not give of boxes of regions, and the regions that it gives."""
    given: list[Region] = []
    for source in regions_of(piece):
        rest: _Left = []
        for region, box in left:
            both = overlap(box, source.box)
            if both is None:
                rest.append((region, box))
                continue
            given.append(region.at(both))
            rest += [(region, other) for other in less(box, both)]
        left = rest
    return left, given


def _listed(found: Sequence[Held]) -> str:
    """Slices in words."""
    told = []
    for each in found[:4]:
        piece = each.piece
        boxes = [":".join(map(str, side)) for box in piece.boxes for side in box]
        what = f"elements {piece.flat}" if piece.flat else f"[{', '.join(boxes)}]"
        told.append(f"{what} of {list(piece.shape)} in {each.part}")
    return ", ".join(told) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
