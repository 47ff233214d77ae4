"""Records on their way from a client's sources through a channel, in frames of bounded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from adacheck_store.format.errors import MalformedError, UsageError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.record import Block

from .base import RecordSource, Source
from .channel import Channel, ChannelError, flat
from .intake import sizes_of
from .pool import expect
from .wire import MAX_PAYLOAD_BYTES, Kind

_PART_BYTES = 4 << 20
_HEAD_BYTES = 1 << 20
_PART_ITEMS = 400
_COPIED_BYTES = 64 << 10


def announcement(sources: Sequence[Source]) -> bytes:
    """What a put announces of its sources: [key, id or null, sizes or null] each, as JSON."""
    entries = [[source.key, source.expected_id, sizes_of(source)] for source in sources]
    data = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    if len(data) > MAX_PAYLOAD_BYTES:
        raise UsageError(
            f"a put of {len(sources)} records, whose announcement takes {len(data)} bytes of "
            f"{MAX_PAYLOAD_BYTES}",
            hint="put fewer records at a time",
        )
    return data


class Parts:
    """Pieces of a stream on their way into frames."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.answered = False
        """Whether the agent has answered already, by an error."""
        self._items: list[list[Any]] = []
        self._views: list[memoryview] = []
        self._bytes = 0

    def add(self, what: str, name: str, index: int, data: memoryview, *, lasting: bool) -> None:
        """Add a piece; unless its bytes are ``lasting`` they are sent or copied before return."""
        if not lasting and len(data) <= _COPIED_BYTES:
            data, lasting = memoryview(bytes(data)), True
        self._items.append([what, name, index, len(data)])
        self._views.append(data)
        self._bytes += len(data)
        if not lasting or self._bytes >= _PART_BYTES or len(self._items) >= _PART_ITEMS:
            self.flush()

    def flush(self) -> None:
        """Send what is there; raises the agent's error if it has sent one already."""
        if self._items:
            if self._channel.readable():
                self.answered = True
                expect(self._channel)
                raise ChannelError("an answer before the end of the stream")
            self._channel.send(Kind.PART, {"items": self._items}, self._views)
        self._items, self._views, self._bytes = [], [], 0


def send_stream(channel: Channel, sources: Sequence[Source], sealed: list[SealedHead]) -> None:
    """Send the blocks and heads of some sources, and wait for the answer.

    ``sealed`` is filled with their heads. Whatever a source raises is raised when the agent has
    been told, and nothing has been kept there.
    """
    parts = Parts(channel)
    try:
        for source in sources:
            lasting = isinstance(source, RecordSource)
            for block in source.blocks():
                _send_block(parts, block, lasting)
            sealed.append(_send_head(parts, source.seal()))
        parts.flush()
    except ChannelError:
        raise
    except BaseException:
        _give_up(channel, parts.answered)
        raise
    channel.send(Kind.END, {})
    expect(channel)


def _send_block(parts: Parts, block: Block, lasting: bool) -> None:
    data = flat(block.data)
    if len(data) > BLOCK_BYTES:
        raise MalformedError(f"a block of {len(data)} bytes", rule="stream")
    parts.add("b", block.array, block.index, data, lasting=lasting)


def _send_head(parts: Parts, sealed: SealedHead) -> SealedHead:
    raw = memoryview(sealed.raw)
    for index, at in enumerate(range(0, len(raw), _HEAD_BYTES)):
        parts.add("h", "", index, raw[at : at + _HEAD_BYTES], lasting=True)
    parts.add("s", sealed.id, 0, memoryview(sealed.info.encode()), lasting=True)
    return sealed


def _give_up(channel: Channel, answered: bool) -> None:
    """End the stream before its records do, and let the agent say that it has withdrawn them."""
    try:
        channel.send(Kind.END, {})
        if not answered:
            channel.skip(channel.receive())
    except ChannelError:
        channel.broken = True
