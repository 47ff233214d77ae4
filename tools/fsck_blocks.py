"""Checks of the blocks of records, read ahead: their digests, and zeros where nothing is used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from adacheck_store.ahead import Ahead
from adacheck_store.arrays import byte_view
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import AdaCheckError, RecordNotFoundError
from adacheck_store.format.head import ArrayInfo, Head
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.record import block_nbytes, verify_block
from adacheck_store.tiers.base import Tier
from adacheck_store.windows import Spare

from .findings import Finding, finding, of_error

Pieces = Mapping[str, Sequence[tuple[int, int]]]
"""Array -> the element ranges that are in use, ascending."""

READ_BLOCKS = 8
"""Blocks read at once, the length of an object; with the reads under way what bounds memory."""

_FINDINGS_PER_RECORD = 3
"""Damaged blocks named of one record; the others are counted."""


@dataclass(slots=True)
class Content:
    """A record whose blocks are checked: byte ranges that are not in use, by array, and the blocks
    that were found ``wrong``, by array and index. ``runs`` has the first blocks of the runs in
    which anything was found. ``gone``: it was deleted meanwhile."""

    key: str
    unused: Mapping[str, Sequence[tuple[int, int]]]
    wrong: set[tuple[str, int]] = field(default_factory=set)
    runs: set[tuple[str, int]] = field(default_factory=set)
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of a record that are on their way: what is wrong with each, and unused bytes of it
    that are not zero."""

    content: Content
    info: ArrayInfo
    first: int
    read: Future[list[AdaCheckError | list[tuple[int, int]]]]
    last: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return sum(block_nbytes(self.info, self.first + i) for i in range(len(self.read.result())))


class BlockCheck:
    """Reads blocks of a tier's records in threads, each once; findings come in order."""

    def __init__(self, tier: Tier, ahead: Ahead) -> None:
        self._tier, self._ahead = tier, ahead
        self._spare = Spare()

    def begin(
        self, key: str, head: Head, pieces: Pieces | None,
        only: Collection[tuple[str, int]] | None = None,
    ) -> Iterator[Run]:  # fmt: skip
        """Have all blocks of a record read, run by run; without ``pieces`` all bytes are in use.

        ``only`` are the runs that are wanted, as in `Content.runs`; None for all.
        """
        unused = {} if pieces is None else {
            info.name: _unused(info, pieces.get(info.name, ())) for info in head.arrays
        }  # fmt: skip
        content = Content(key, unused)
        starts = [(info, first) for info in head.arrays
                  for first in range(0, len(info.digests), READ_BLOCKS)
                  if only is None or (info.name, first) in only]  # fmt: skip
        for number, (info, first) in enumerate(starts, 1):
            read = self._ahead.start(self._read, content, info, first)
            yield Run(content, info, first, read, last=number == len(starts))

    def findings(self, run: Run) -> Iterator[Finding]:
        """What is wrong with a run of blocks, as soon as it is here; runs are asked in order."""
        content, info, name = run.content, run.info, self._tier.traits.name
        for index, found in enumerate(run.read.result(), run.first):
            if isinstance(found, RecordNotFoundError) and not content.gone:
                content.gone = self._is_gone(content.key)
            if content.gone:
                return
            if found:
                content.runs.add((info.name, run.first))
            if isinstance(found, AdaCheckError):
                content.wrong.add((info.name, index))
                if len(content.wrong) <= _FINDINGS_PER_RECORD:
                    yield self._wrong_block(found, content.key, info, index)
                continue
            for start, stop in found:
                yield finding("padding", f"bytes {start}..{stop} of {info.name} are not zero",
                              tier=name, key=content.key)  # fmt: skip
        if run.last and len(content.wrong) > _FINDINGS_PER_RECORD:
            what = f"{len(content.wrong)} blocks are wrong in all"
            yield finding("block", what, tier=name, key=content.key)

    def _is_gone(self, key: str) -> bool:
        try:
            self._tier.head(key)
        except RecordNotFoundError:
            return True
        except AdaCheckError:
            return False
        return False

    def _read(
        self, content: Content, info: ArrayInfo, first: int
    ) -> list[AdaCheckError | list[tuple[int, int]]]:
        """Of each block what is wrong with it, else its unused bytes that are not zero."""
        count = min(READ_BLOCKS, len(info.digests) - first)
        memory = self._spare.take(READ_BLOCKS * BLOCK_BYTES)
        try:
            end = (count - 1) * BLOCK_BYTES + block_nbytes(info, first + count - 1)
            data = byte_view(memory)[:end]
            try:
                self._tier.read_into(content.key, info.name, first, count, data)
            except AdaCheckError as error:
                if count == 1:
                    return [error]
                whole = False
            else:
                whole = True
            return [self._block(content, info, first + i,
                                data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES], whole)
                    for i in range(count)]  # fmt: skip
        finally:
            self._spare.give(memory)

    def _block(
        self, content: Content, info: ArrayInfo, index: int, data: memoryview, here: bool
    ) -> AdaCheckError | list[tuple[int, int]]:
        """One block, which is ``here`` or has to be read by itself."""
        try:
            if not here:
                self._tier.read_into(content.key, info.name, index, 1, data)
            verify_block(info, index, data)
        except AdaCheckError as error:
            return error
        low, high, found = index * BLOCK_BYTES, index * BLOCK_BYTES + len(data), []
        unused = content.unused.get(info.name, ())
        for at in range(bisect_right(unused, low, key=lambda span: span[1]), len(unused)):
            start, stop = max(unused[at][0], low), min(unused[at][1], high)
            if start >= high:
                break
            if any(data[start - low : stop - low]):
                found.append((start, stop))
        return found

    def _wrong_block(self, error: AdaCheckError, key: str, info: ArrayInfo, index: int) -> Finding:
        at = index * BLOCK_BYTES
        what = f"{error.message} (array {info.name}, bytes {at}..{at + block_nbytes(info, index)})"
        path = str(error.place.get("path", "") or getattr(self._tier, "path", ""))
        found = of_error(error, self._tier.traits.name, key, "block")
        if found.kind == "tier-unread":
            return found
        return finding("block", what, tier=self._tier.traits.name, key=key, path=path)


def _unused(info: ArrayInfo, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Byte ranges of an array outside the ranges in use."""
    size, end, found = item_bytes(info.dtype), 0, []
    for start, stop in [*used, (info.elements, info.elements)]:
        if start > end:
            found.append((end * size, start * size))
        end = max(end, stop)
    return found
