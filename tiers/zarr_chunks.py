"""Reading and writing the bytes of one zarr array, chunk object by chunk object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from adacheck_store.format.errors import MalformedError, RecordNotFoundError, TruncatedError

from .flight import Batch, Runway
from .objects import Objects
from .transfer import aligned, copy_into


def chunk_name(array: str, index: int) -> str:
    """Name of a chunk's object."""
    return f"{array}/c/{index}"


@runtime_checkable
class Filling(Protocol):
    """Objects that read to where the bytes are wanted, without a copy of their own."""

    def get_into(self, name: str, start: int, out: memoryview) -> int:
        """Fill ``out``, less where the object ends before; how many bytes.

        Raises `RecordNotFoundError`.
        """
        ...


def read_span(
    objects: Objects, array: str, chunk: int, start: int, stop: int, runway: Runway | None = None
) -> bytes:
    """Bytes start..stop of an array whose chunks hold ``chunk`` bytes; several side by side.

    A missing chunk is `RecordNotFoundError`, never zeros; a short one `TruncatedError`.
    """

    def one(part: tuple[int, int, int]) -> bytes:
        index, at, wanted = part
        with _chunk(array, index):
            piece = objects.get(chunk_name(array, index), at, wanted)
        _check_length(array, index, at + wanted, at + len(piece))
        return piece

    parts = _parts(chunk, start, stop)
    pieces = runway.each(one, parts) if runway else [one(part) for part in parts]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def fill_span(
    objects: Filling, array: str, chunk: int, start: int, out: memoryview, runway: Runway
) -> None:
    """What `read_span` gives, to where it is wanted: as many bytes as ``out`` has."""

    def one(part: tuple[int, int, int]) -> None:
        index, at, wanted = part
        place = index * chunk + at - start
        with _chunk(array, index):
            count = objects.get_into(chunk_name(array, index), at, out[place : place + wanted])
        _check_length(array, index, at + wanted, at + count)

    runway.each(one, _parts(chunk, start, start + len(out)))


def _parts(chunk: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """The chunks that bytes start..stop lie in: index, first byte there, and how many."""
    parts: list[tuple[int, int, int]] = []
    while start < stop:
        index, at = divmod(start, chunk)
        parts.append((index, at, min(stop - start, chunk - at)))
        start += parts[-1][2]
    return parts


@contextmanager
def _chunk(array: str, index: int) -> Iterator[None]:
    try:
        yield
    except RecordNotFoundError as exc:
        raise RecordNotFoundError(f"chunk {index} of {array} is missing") from exc


def _check_length(array: str, index: int, expected: int, found: int) -> None:
    if found != expected:
        raise TruncatedError(f"chunk {index} of {array} ends after {found} bytes")


class ChunkWriter:
    """Cuts the bytes of one array into chunk objects of ``chunk`` bytes.

    An array of one chunk is written at its own length, the last of several is padded. Where
    ``expected``, the array's size, is known, the last chunk is written as soon as it is full.
    With ``repair`` only chunks that differ from what stands there are written.
    """

    def __init__(
        self, batch: Batch, array: str, chunk: int, *, expected: int | None = None,
        repair: bool = False,
    ) -> None:  # fmt: skip
        self._batch = batch
        self._array = array
        self._repair = repair
        self._expected = expected
        self._buffer = aligned(chunk)
        self._filled = 0
        self._index = 0
        self._ended = False
        self.chunk = chunk
        self.nbytes = 0

    def add(self, data: memoryview) -> None:
        """Append bytes, which may be reused afterwards."""
        if self._expected is not None and self.nbytes + data.nbytes > self._expected:
            raise MalformedError(
                f"more than {self._expected} bytes of {self._array}", rule="stream"
            )
        while data.nbytes:
            if self._filled == self.chunk:
                self._write(self.chunk)
            size = min(self.chunk - self._filled, data.nbytes)
            copy_into(self._buffer, self._filled, data[:size])
            self._filled += size
            self.nbytes += size
            data = data[size:]
        if self.nbytes == self._expected:
            self.end()

    def end(self) -> int:
        """Write what is left, unless that was done; returns the length of a chunk."""
        if not self._ended:
            self._ended = True
            if self._index == 0:
                self.chunk = self._filled
            else:
                self._buffer[self._filled :] = bytes(len(self._buffer) - self._filled)
            if self._filled:
                self._write(self.chunk)
            self._buffer = memoryview(b"")
        return self.chunk

    def _write(self, size: int) -> None:
        name = chunk_name(self._array, self._index)
        self._batch.put(name, self._buffer[:size], if_differs=self._repair)
        if not self._batch.at_once:
            self._buffer = aligned(0 if self._ended else self.chunk)
        self._index += 1
        self._filled = 0
