"""The peer tier: an ordinary tier whose records live in a named tier of an agent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from adacheck_store.format.errors import (
    AdaCheckError,
    OrderError,
    TierUnavailableError,
    TruncatedError,
)
from adacheck_store.format.head import MAX_HEAD_BYTES, MAX_INFO_BYTES, SealedHead
from adacheck_store.format.ids import BLOCK_BYTES
from adacheck_store.format.keys import is_key, parse_key

from .base import RecordSource, Source, Tier, TierTraits
from .channel import Channel, ChannelError
from .intake import placed
from .outgoing import announcement, send_stream
from .places import KnownPlaces, Places, open_places
from .pool import Peer, expect
from .wire import Frame, Kind

_LIST_BYTES_MAX = 1 << 30
_DELETE_KEYS = 4096


class PeerTier(Tier):
    """A tier of an agent, over a `Peer`.

    Errors are the agent's, with this tier's name in their place; where it does not answer, a
    `TierUnavailableError`. A put whose connection is lost is made a second time if its sources are
    in memory; else it counts as done if the agent has all its records.
    """

    def __init__(
        self, peer: Peer, tier: str, traits: TierTraits | None = None, *, shared: bool = False
    ) -> None:
        """Connects to nothing yet. ``tier`` is its name there, ``traits`` what is known of it, its
        name here among that. With ``shared`` the peer is not closed with the tier."""
        self.traits = traits or TierTraits(name=f"{tier}@{peer.endpoint}")
        self.peer = peer
        self.tier = tier
        self._shared = shared
        self._closed = False

    def put(self, sources: Sequence[Source]) -> None:
        """Store records; see `Tier.put`."""
        with self._placed():
            if not sources:
                return
            ordered = sorted(sources, key=_stream_order)
            head = {"verb": "put", "tier": self.tier}
            announced = announcement(ordered)
            sealed: list[SealedHead] = []

            def act(channel: Channel) -> None:
                sealed.clear()
                channel.send(Kind.CALL, head, [announced])
                send_stream(channel, ordered, sealed)

            again = all(isinstance(source, RecordSource) for source in ordered)
            with self.peer.stream():
                try:
                    self.peer.exchange(act, again=again)
                except TierUnavailableError:
                    if again or not self._has(ordered, sealed):
                        raise

    def _has(self, sources: Sequence[Source], sealed: Sequence[SealedHead]) -> bool:
        """Whether the agent has all of a put whose answer was lost."""
        if len(sealed) < len(sources):
            return False
        pairs = zip(sources, sealed, strict=True)
        try:
            return all(self.head(source.key).id == head.id for source, head in pairs)
        except AdaCheckError:
            return False

    def head(self, key: str) -> SealedHead:
        """The verified head of a record."""
        with self._placed(key=key):
            return self.peer.exchange(lambda channel: self._head(channel, key))

    def _head(self, channel: Channel, key: str) -> SealedHead:
        channel.send(Kind.CALL, {"verb": "head", "tier": self.tier, "key": key})
        raw = bytearray()
        while (frame := expect(channel)).kind is Kind.PART:
            raw += channel.payload(frame)
            if len(raw) > MAX_HEAD_BYTES + MAX_INFO_BYTES:
                raise ChannelError(f"a head of over {MAX_HEAD_BYTES} bytes")
        raw += channel.payload(frame)
        end = len(raw) - _size(frame, "info", len(raw))
        try:
            info = str(raw[end:], "utf-8")
        except UnicodeDecodeError as exc:
            raise ChannelError("a head whose info is no text") from exc
        return SealedHead.open(bytes(raw[:end]), str(frame.head.get("id")), info)

    def read(self, key: str, array: str, first: int, count: int) -> memoryview:
        """Bytes of a run of blocks, not verified, received into one buffer."""
        with self._placed(key=key):
            return self.peer.exchange(lambda channel: self._read(channel, key, array, first, count))

    def read_into(self, key: str, array: str, first: int, count: int, out: memoryview) -> None:
        """The same into memory of the caller's; inside a node from the agent's, if it may be."""
        with self._placed(key=key):
            known = self.peer.places
            places = self._places(known, key) if known is not None else None
            if known is not None and places is not None:
                if places.fill(array, first, count, out):
                    return
                known.forget(self.tier, key)  # it was dropped, or something else was
            self.peer.exchange(lambda channel: self._read(channel, key, array, first, count, out))

    def _places(self, known: KnownPlaces, key: str) -> Places | None:
        """Where a record lies in the agent's memory, None if that cannot be learned."""
        with suppress(KeyError):
            return known.get(self.tier, key)
        try:
            places = self.peer.exchange(lambda channel: self._ask_places(channel, key))
        except AdaCheckError:
            places = None  # the call that takes its place says what is wrong
        return known.learn(self.tier, key, places)

    def _ask_places(self, channel: Channel, key: str) -> Places | None:
        channel.send(Kind.CALL, {"verb": "places", "tier": self.tier, "key": key})
        descriptors: list[int] = []
        try:
            frame = expect(channel, None, descriptors)
            payload = channel.payload(frame)
            if not descriptors:
                return None
            return open_places(frame.head.get("epoch"), payload, descriptors.pop())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(
        self, channel: Channel, key: str, array: str, first: int, count: int,
        out: memoryview | None = None,
    ) -> memoryview:  # fmt: skip
        channel.send(
            Kind.CALL,
            {"verb": "read", "tier": self.tier, "key": key, "array": array, "first": first,
             "count": count},
        )  # fmt: skip
        frame = expect(channel)
        # At most what was asked for, whatever the agent says.
        size = _size(frame, "of", max(0, count) * BLOCK_BYTES)
        # Numpy asks for large pages: fresh memory would cost several times the transfer.
        view = np.empty(size, np.uint8).data if out is None else out
        if size > len(view):
            raise ChannelError("more bytes than asked for")
        filled = 0
        while True:
            if frame.payload_bytes > len(view) - filled:
                raise ChannelError("more bytes than announced")
            channel.payload_into(view[filled : filled + frame.payload_bytes])
            filled += frame.payload_bytes
            if frame.kind is Kind.ANSWER:
                break
            frame = expect(channel)
        if filled != len(view):
            raise TruncatedError(f"{filled} bytes came of {len(view)}")
        return view

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with a prefix, sorted; all are fetched before the first is given."""
        with self._placed():
            pages = self.peer.exchange(lambda channel: self._list(channel, prefix))
        for page in pages:
            yield from page.decode(errors="replace").splitlines()

    def _list(self, channel: Channel, prefix: str) -> Sequence[bytes]:
        channel.send(Kind.CALL, {"verb": "list", "tier": self.tier, "prefix": prefix})
        pages, size = [], 0
        while (frame := expect(channel)).kind is Kind.PART:
            size += frame.payload_bytes
            if size > _LIST_BYTES_MAX:
                raise ChannelError(f"a list of over {_LIST_BYTES_MAX} bytes")
            pages.append(channel.payload(frame))
        channel.skip(frame)
        return pages

    def delete(self, keys: Iterable[str]) -> None:
        """Delete records; missing ones are passed over."""
        with self._placed():
            # What is no key is nothing's name, and might not even be a line of text.
            names = [key for key in keys if is_key(key)]
            for at in range(0, len(names), _DELETE_KEYS):
                payload = "\n".join(names[at : at + _DELETE_KEYS]).encode()
                self.peer.call("delete", {"tier": self.tier}, payload)

    def sync(self) -> None:
        """Return when everything put before is as durable as the agent's tier makes it."""
        with self._placed():
            self.peer.call("sync", {"tier": self.tier})

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        if not self._shared:
            self.peer.close()

    @contextmanager
    def _placed(self, **place: str) -> Iterator[None]:
        with placed(tier=self.traits.name, **place):
            if self._closed:
                raise OrderError("the tier is closed")
            yield


def _stream_order(source: Source) -> tuple[int, str]:
    """Place of a source in a put's stream, one that suits every tier.

    The tier there takes records as they come, and one that keeps packs wants the steps of a part
    in order, after all else.
    """
    if is_key(source.key) and parse_key(source.key).kind in ("delta", "extra"):
        return 1, source.key
    return 0, ""


def _size(frame: Frame, name: str, most: int) -> int:
    """A number of bytes that an answer says; raises `ChannelError` for one that cannot be."""
    size = frame.head.get(name)
    if type(size) is not int or not 0 <= size <= most:
        raise ChannelError(f"an answer with {name} {size!r:.50}")
    return size
