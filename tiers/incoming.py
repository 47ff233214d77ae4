"""Records on their way through a channel into a tier: its sources, in the order they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adacheck_store.format import strict
from adacheck_store.format.errors import MalformedError, TruncatedError
from adacheck_store.format.head import MAX_HEAD_BYTES, SealedHead
from adacheck_store.format.record import Block

from .channel import Channel, ChannelError
from .wire import Frame, Kind, decode_json


@dataclass(frozen=True, slots=True)
class Piece:
    """An item of a put's stream: ``b`` a block, ``h`` part of a head, ``s`` the seal."""

    what: str
    name: str
    index: int
    data: memoryview


class Incoming:
    """The stream of one put. Pieces are taken as the tier asks for them, one buffer for all.

    ``buffer`` takes the payload of a frame: `wire.MAX_PAYLOAD_BYTES`.
    """

    def __init__(self, channel: Channel, buffer: bytearray) -> None:
        self._channel = channel
        self._buffer = memoryview(buffer)
        self._pieces = self._read()
        self._at = 0
        """Source whose pieces come next."""
        self._ended = False

    def announced(self, payload: bytes) -> list[IncomingSource]:
        """The sources that the call announces: [key, id or null, sizes or null] each."""
        try:
            sources = []
            for number, entry in enumerate(strict.items(decode_json(payload))):
                key, identity, sizes = strict.items(entry, 3)
                for name, size in strict.fields(sizes).items() if sizes is not None else ():
                    strict.text(name)
                    strict.count(size)
                known = None if identity is None else strict.text(identity)
                sources.append(
                    IncomingSource(self, number, strict.text(key, empty=True), known, sizes)
                )
        except ValueError as exc:
            raise MalformedError(f"announcement: {exc}"[:200], rule="call") from exc
        return sources

    def blocks(self, number: int) -> Iterator[Block]:
        """The blocks of a source; what comes before it is passed over."""
        if number < self._at:
            raise MalformedError(f"source {number} was there before {self._at}", rule="stream")
        while self._at < number:
            if self._next().what == "s":
                self._at += 1
        while (piece := self._next()).what == "b":
            yield Block(piece.name, piece.index, piece.data)
        self._first_of_head = piece

    def seal(self, number: int) -> SealedHead:
        """The head of the source whose blocks were taken."""
        piece, raw = self._first_of_head, bytearray()
        while piece.what == "h":
            raw += piece.data
            if len(raw) > MAX_HEAD_BYTES:
                raise MalformedError(f"a head of over {MAX_HEAD_BYTES} bytes", rule="head-size")
            piece = self._next()
        if piece.what != "s" or number != self._at:
            raise MalformedError("a block after the head", rule="stream")
        self._at += 1
        try:
            return SealedHead.open(bytes(raw), piece.name, str(piece.data, "utf-8"))
        except UnicodeDecodeError as exc:
            raise MalformedError("an info that is no text", rule="info") from exc

    def drain(self) -> None:
        """Take what is left of the stream, for nothing."""
        while not self._ended:
            self._frame()

    def _next(self) -> Piece:
        piece = next(self._pieces, None)
        if piece is None:
            raise TruncatedError("the stream of a put ends before its records do")
        return piece

    def _read(self) -> Iterator[Piece]:
        while (frame := self._frame()) is not None:
            view = self._buffer[: frame.payload_bytes]
            try:
                for item in strict.items(frame.head.get("items")):
                    what, name, index, size = strict.items(item, 4)
                    if what not in ("b", "h", "s") or strict.count(size) > len(view):
                        raise ValueError(f"item {item!r:.100}")
                    yield Piece(
                        what, strict.text(name, empty=True), strict.count(index), view[:size]
                    )
                    view = view[size:]
            except ValueError as exc:
                raise MalformedError(f"stream: {exc}"[:200], rule="stream") from exc

    def _frame(self) -> Frame | None:
        """The next frame of the stream, its payload in the buffer; None at its end."""
        if self._ended:
            return None
        frame = self._channel.receive(self._channel.limits.answer_s)
        self._channel.payload_into(self._buffer[: frame.payload_bytes])
        if frame.kind is Kind.PART:
            return frame
        if frame.kind is not Kind.END:
            raise ChannelError(f"a frame of kind {frame.kind.name} within a put")
        self._ended = True
        return None


@dataclass(frozen=True, slots=True)
class IncomingSource:
    """One record of a put, as a `Source` for the tier."""

    _incoming: Incoming
    _number: int
    key: str
    expected_id: str | None
    sizes: dict[str, int] | None

    def blocks(self) -> Iterator[Block]:
        """The blocks, each in a buffer that the next one reuses."""
        return self._incoming.blocks(self._number)

    def seal(self) -> SealedHead:
        """The head."""
        return self._incoming.seal(self._number)
