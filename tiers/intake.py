"""Intake is what a record must show to be let into a tier: one set of rules for all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from adacheck_store.format.errors import (
    AdaCheckError,
    ChainBrokenError,
    DigestMismatchError,
    ForkError,
    FormatError,
    MalformedError,
    RecordNotFoundError,
    TruncatedError,
)
from adacheck_store.format.head import Head, SealedHead, check_key
from adacheck_store.format.ids import BLOCK_BYTES, block_digest
from adacheck_store.format.keys import Key, layout_key, parse_key
from adacheck_store.format.record import Block, verify_block

from .base import RecordSource, Source, Tier

LINKED_KINDS = frozenset(("base", "delta", "extra"))


class Intake:
    """Follows one source: digests its blocks on their way, then judges its head.

    With ``known``, the head of a record that is to be repaired, each block is verified before it
    is handed on, so that a false source cannot overwrite what is there.
    """

    def __init__(self, source: Source, known: SealedHead | None = None) -> None:
        self.source = source
        self.known = known
        self._digests: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}

    def blocks(self) -> Iterator[Block]:
        """The source's blocks as flat bytes, in order for each array."""
        for block in self.source.blocks():
            data = block.data if block.data.format == "B" else block.data.cast("B")
            digests = self._digests.setdefault(block.array, [])
            size = self._sizes.get(block.array, 0)
            if block.index != len(digests) or size != block.index * BLOCK_BYTES:
                raise MalformedError(
                    f"block {block.index} of {block.array} comes after {size} bytes", rule="stream"
                )
            if not 0 < data.nbytes <= BLOCK_BYTES:
                raise MalformedError(f"a block of {data.nbytes} bytes", rule="stream")
            if self.known is not None:
                verify_block(self.known.head.array(block.array), block.index, data)
                digests.append("")
            else:
                digests.append(block_digest(data))
            self._sizes[block.array] = size + data.nbytes
            yield Block(block.array, block.index, data)

    def seal(self) -> SealedHead:
        """The source's head, found to fit key, expected id and blocks."""
        sealed = self.source.seal()
        expected = self.source.expected_id
        if expected is not None and sealed.id != expected:
            raise DigestMismatchError("the source's head has another id than was announced")
        check_place(parse_key(self.source.key), sealed)
        strays = self._digests.keys() - {info.name for info in sealed.head.arrays}
        if strays:
            raise MalformedError(f"blocks of no array of the head: {sorted(strays)}", rule="stream")
        for info in sealed.head.arrays:
            got = self._sizes.get(info.name, 0)
            if got < info.nbytes:
                raise TruncatedError(f"{got} bytes of {info.name}, {info.nbytes} announced")
            if got > info.nbytes:
                raise MalformedError(
                    f"{got} bytes of {info.name}, not {info.nbytes}", rule="stream"
                )
            if self.known is None and tuple(self._digests.get(info.name, ())) != info.digests:
                raise DigestMismatchError(f"blocks of {info.name} differ from the head's digests")
        return sealed


def check_place(key: Key, sealed: SealedHead) -> None:
    """Check that a head lies under its own key; raises `MalformedError` (rule ``swapped``)."""
    check_key(key, sealed.head, sealed.id)


def check_record_key(text: str) -> Key:
    """Parse the key of a record to be put; a pack is no record."""
    key = parse_key(text)
    if key.kind == "pack":
        raise MalformedError("the key of a pack, not of a record", rule="key").at(key=text)
    return key


def check_sources(sources: Sequence[Source]) -> list[Key]:
    """The keys of a put, each within the grammar and there once."""
    keys = [check_record_key(source.key) for source in sources]
    seen: set[str] = set()
    for source in sources:
        if source.key in seen:
            raise ForkError("a key stands twice in one put").at(key=source.key)
        seen.add(source.key)
    return keys


def check_same(source: Source, held: SealedHead) -> None:
    """Check that a record may be put over one that is there; raises `ForkError`."""
    if source.expected_id != held.id:
        raise ForkError(
            f"another record is there, {held.id[:16]}..., "
            f"not {(source.expected_id or 'one of unknown id')[:16]}",
            hint="records are never replaced; open a new term, or use a fresh key",
        ).at(key=source.key, **held.head.place())


def sizes_of(source: Source) -> dict[str, int] | None:
    """Bytes of each array of a source, where known before its blocks are asked for."""
    if isinstance(source, RecordSource):
        return {info.name: info.nbytes for info in source.record.sealed.head.arrays}
    sizes: dict[str, int] | None = getattr(source, "sizes", None)
    return sizes


def ask_before_heads(sources: Sequence[Source]) -> None:
    """Call what sources want called before any of their records is visible."""
    for source in sources:
        ask: Callable[[], None] | None = getattr(source, "before_heads", None)
        if ask is not None:
            ask()


class Links:
    """Which layouts and manifest revisions a tier holds; what was seen is not looked up again."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._held: set[str] = set()

    def check(self, arrivals: Iterable[SealedHead]) -> None:
        """Raise `ChainBrokenError` unless all that the heads name is held, or arrives with them."""
        heads = list(arrivals)
        coming = {s.id for s in heads if s.head.kind in ("layout", "manifest")}
        for sealed in heads:
            head = sealed.head
            if head.kind not in LINKED_KINDS:
                continue
            for what, link in (("layout", head.layout), ("manifest", head.manifest)):
                if link and link not in coming and not self._holds(head, what, link):
                    raise ChainBrokenError(
                        f"a {head.kind} whose {what} {link[:16]}... is not held here",
                        hint=f"put the {what} before it, or in the same call",
                    ).at(tier=self._tier.traits.name, **head.place())

    def forget(self) -> None:
        """Look everything up again: something was deleted."""
        self._held.clear()

    def _holds(self, head: Head, what: str, link: str) -> bool:
        if link in self._held:
            return True
        if what == "layout":
            keys: Iterable[str] = [str(layout_key(head.run, link))]
        else:
            keys = self._tier.list(f"{head.run}/{head.term}/manifest/")
        found = False
        for key in keys:
            try:
                identity = self._tier.head(key).id
            except (FormatError, RecordNotFoundError):
                continue
            self._held.add(identity)
            found = found or identity == link  # not by what is kept: another thread may forget it
        return found


@contextmanager
def placed(**place: str) -> Iterator[None]:
    """Give errors that pass through the tier, key and path they lack."""
    try:
        yield
    except AdaCheckError as exc:
        exc.at(**place)
        raise
