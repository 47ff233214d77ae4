"""What an agent answers: a tier's methods as calls on named tiers; all else is a control call."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.errors import (
    AdaCheckError,
    MalformedError,
    PeerRefusedError,
    UnsupportedError,
)
from adacheck_store.format.keys import is_key

from .base import Tier
from .blocks import check_range, span
from .channel import Channel, ChannelError
from .incoming import Incoming
from .intake import placed
from .places import places_of
from .wire import MAX_PAYLOAD_BYTES, Frame, Kind, error_head

_WINDOW_BLOCKS = 4
"""Blocks that one call has in memory while its reader is slow."""

_LIST_BYTES = 256 << 10
_SPARE_BUFFERS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who calls. ``run`` is proven where ``proven`` says so (TLS), else what the caller said.

    ``client`` is the same as long as the caller's `Peer` lives; ``session`` changes whenever its
    connections were lost.
    """

    session: str
    client: str
    run: str
    proven: bool
    where: str
    software: str = ""


Control = Callable[[str, Mapping[str, Any], bytes, PeerInfo], tuple[Mapping[str, Any], bytes]]
"""Answers a control call: verb, head, payload and caller -> head and payload."""


Tiers = Mapping[str, Tier | Callable[[PeerInfo], Tier]]
"""Tiers by name; one that answers each caller otherwise is made of who calls."""


def no_control(
    verb: str, head: Mapping[str, Any], payload: bytes, peer: PeerInfo
) -> tuple[Mapping[str, Any], bytes]:
    """The control handler of an agent that has none: raises `UnsupportedError`."""
    raise UnsupportedError(
        f"an agent without the call {verb[:100]!r}",
        hint="versions of agent and caller may differ: upgrade the older one",
    )


def refuse(channel: Channel, exc: Exception, *, of_tier: bool) -> None:
    """Answer by an error; one that is not of our tree is a bug, and goes to the log.

    That of a tier goes without the tier's name: the caller knows the tier by another one.
    """
    if not isinstance(exc, AdaCheckError):
        _log.error("a call failed", exc_info=exc)
    elif of_tier:
        exc.place.pop("tier", None)
    channel.send(Kind.ERROR, error_head(exc))


class Calls:
    """Answers calls, by tiers and a control handler."""

    def __init__(self, tiers: Tiers, control: Control = no_control) -> None:
        self._tiers = tiers
        self._control = control
        # Fresh memory costs as much as what is received into it: a few buffers are kept.
        self._spare: deque[bytearray] = deque(maxlen=_SPARE_BUFFERS)
        self._verbs = {
            "put": self._put, "head": self._head, "read": self._read, "list": self._list,
            "delete": self._delete, "sync": self._sync, "places": self._places,
        }  # fmt: skip

    def answer(self, channel: Channel, call: Frame, peer: PeerInfo) -> None:
        """Answer one call, whatever it asks, by an answer or an error.

        Raises `ChannelError` where the connection is of no further use.
        """
        verb = str(call.head.get("verb"))
        if call.kind is not Kind.CALL or verb in ("hello", "ping"):
            raise ChannelError(f"{call.kind.name} {verb:.50} out of turn")
        try:
            self._dispatch(verb, channel, call, peer)
        except ChannelError:
            raise
        except Exception as exc:
            refuse(channel, exc, of_tier=verb in self._verbs)

    def _dispatch(self, verb: str, channel: Channel, call: Frame, peer: PeerInfo) -> None:
        payload = channel.payload(call)
        known = self._verbs.get(verb)
        if known is None:
            head, data = self._control(verb, call.head, payload, peer)
            if len(data) > MAX_PAYLOAD_BYTES:
                raise MalformedError(f"an answer of {len(data)} bytes", rule="frame")
            channel.send(Kind.ANSWER, head, [data])
            return
        known(_Call(channel, call.head, payload, peer))

    def _tier(self, call: _Call) -> Tier:
        name = call.text("tier")
        tier = self._tiers.get(name)
        if tier is None:
            raise UnsupportedError(
                f"an agent without a tier {name[:100]!r}", hint=f"it has {sorted(self._tiers)}"
            )
        return tier if isinstance(tier, Tier) else tier(call.peer)

    # -- the verbs --

    def _put(self, call: _Call) -> None:
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = bytearray(MAX_PAYLOAD_BYTES)
        try:
            self._put_by(call, Incoming(call.channel, buffer))
        finally:
            self._spare.append(buffer)

    def _put_by(self, call: _Call, incoming: Incoming) -> None:
        try:
            sources = incoming.announced(call.payload)
            for source in sources:
                call.check_own(source.key)
            self._tier(call).put(sources)
        except ChannelError:
            raise
        except Exception as exc:
            refuse(call.channel, exc, of_tier=True)
            incoming.drain()
        else:
            incoming.drain()
            call.channel.send(Kind.ANSWER, {})

    def _head(self, call: _Call) -> None:
        key = call.own_key()
        sealed = self._tier(call).head(key)
        info = sealed.info.encode()
        parts = [sealed.raw[at : at + (1 << 20)] for at in range(0, len(sealed.raw), 1 << 20)]
        for part in parts[:-1]:
            call.channel.send(Kind.PART, {}, [part])
        call.channel.send(Kind.ANSWER, {"id": sealed.id, "info": len(info)}, [parts[-1], info])

    def _read(self, call: _Call) -> None:
        key, array = call.own_key(), call.text("array")
        first, count = call.number("first"), call.number("count")
        tier = self._tier(call)
        if count <= _WINDOW_BLOCKS:
            data = tier.read(key, array, first, count)
            call.channel.send(Kind.ANSWER, {"of": len(data)}, [data])
            return
        with placed(key=key):
            info = check_range(tier.head(key), array, first, count)
        start, stop = span(info, first, count)
        head = {"of": stop - start}
        for at in range(first, first + count, _WINDOW_BLOCKS):
            data = tier.read(key, array, at, min(_WINDOW_BLOCKS, first + count - at))
            call.channel.send(Kind.PART, head, [data])
        call.channel.send(Kind.ANSWER, head)

    def _places(self, call: _Call) -> None:
        """Where a record lies in this process's memory, with a descriptor of that."""
        key = call.own_key()
        found = places_of(self._tier(call), key) if call.channel.passes else None
        data = json.dumps(found.arrays, separators=(",", ":")).encode() if found else b""
        if found is None or len(data) > MAX_PAYLOAD_BYTES:
            call.channel.send(Kind.ANSWER, {})
            return
        call.channel.send(Kind.ANSWER, {"epoch": found.epoch}, [data], [found.memory.fd])

    def _list(self, call: _Call) -> None:
        prefix = call.text("prefix", empty=True)
        if call.peer.proven:
            own = f"{call.peer.run}/"
            if prefix and not prefix.startswith(own):
                raise call.foreign(prefix)
            prefix = prefix or own
        for page in _pages(self._tier(call).list(prefix)):
            call.channel.send(Kind.PART, {}, [page])
        call.channel.send(Kind.ANSWER, {})

    def _delete(self, call: _Call) -> None:
        keys = call.payload.decode(errors="replace").split("\n") if call.payload else []
        for key in keys:
            call.check_own(key)
        self._tier(call).delete(keys)
        call.channel.send(Kind.ANSWER, {})

    def _sync(self, call: _Call) -> None:
        self._tier(call).sync()
        call.channel.send(Kind.ANSWER, {})


@dataclass(frozen=True, slots=True)
class _Call:
    """A call on a tier, and the readers of its fields; each raises `MalformedError`."""

    channel: Channel
    head: Mapping[str, Any]
    payload: bytes
    peer: PeerInfo

    def text(self, name: str, *, empty: bool = False) -> str:
        try:
            return strict.text(self.head.get(name), empty=empty)
        except ValueError as exc:
            raise MalformedError(f"{name}: {exc}", rule="call") from exc

    def number(self, name: str) -> int:
        try:
            return strict.integer(self.head.get(name))
        except ValueError as exc:
            raise MalformedError(f"{name}: {exc}", rule="call") from exc

    def own_key(self) -> str:
        key = self.text("key", empty=True)
        self.check_own(key)
        return key

    def check_own(self, key: str) -> None:
        """Raise `PeerRefusedError` for a key of another run than the one the caller has proven."""
        if self.peer.proven and is_key(key) and not key.startswith(f"{self.peer.run}/"):
            raise self.foreign(key)

    def foreign(self, key: str) -> PeerRefusedError:
        return PeerRefusedError(
            f"of another run than {self.peer.run}", hint="use that run's own connection", key=key
        )


def _pages(keys: Iterator[str]) -> Iterator[bytes]:
    """Keys, one a line, in pieces of bounded size."""
    page: list[str] = []
    size = 0
    for key in keys:
        page.append(key)
        size += len(key) + 1
        if size >= _LIST_BYTES:
            yield "".join(f"{name}\n" for name in page).encode()
            page, size = [], 0
    if page:
        yield "".join(f"{name}\n" for name in page).encode()
