"""Frames of the right form and any content: an agent answers them, or ends the connection."""

import json
import socket
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck_store.format.record import verify_record
from adacheck_store.tiers import wire
from adacheck_store.tiers.channel import Channel, ChannelError, Limits
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.serve_calls import Calls, PeerInfo
from adacheck_store.tiers.wire import Kind
from tests.conformance.records import World, fetch

WORLD = World(run="gpt-small", term="t000001-" + "a" * 16)
SOURCES = [*WORLD.roots(), WORLD.delta(1, {"0/a/grad.raw": ("U8", b"x" * 100)})]
PEER = PeerInfo("session", "client", "gpt-small", True, "here")
LIMITS = Limits(stall_s=1, answer_s=1)

keys = st.sampled_from([source.key for source in SOURCES] + ["gpt-other/log/000000000001", "a", ""])
scraps = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | keys
values = scraps | st.lists(scraps, max_size=4) | st.dictionaries(st.text(max_size=3), scraps)
verbs = st.sampled_from(["put", "head", "read", "list", "delete", "sync", "hello", "echo"])
tiers = st.sampled_from(["ram", "none", ""])
heads = st.fixed_dictionaries(
    {"verb": verbs | values, "tier": tiers | values},
    optional={"key": keys | values, "array": st.just("0/a/grad.raw") | values, "prefix": values,
              "first": st.integers(-2, 2**61) | values, "count": st.integers(-2, 2**61) | values},
)  # fmt: skip
frames = st.tuples(st.sampled_from(Kind), heads, st.binary(max_size=40))


def whole_put() -> list[tuple[Kind, dict[str, Any], bytes]]:
    """The frames of a put of all sources, one piece in each."""
    announced = [[source.key, source.expected_id, None] for source in SOURCES]
    said: list[tuple[Kind, dict[str, Any], bytes]] = [
        (Kind.CALL, {"verb": "put", "tier": "ram"}, json.dumps(announced).encode())
    ]
    for source in SOURCES:
        pieces = [("b", block.array, block.index, bytes(block.data)) for block in source.blocks()]
        sealed = source.seal()
        pieces += [("h", "", 0, sealed.raw), ("s", sealed.id, 0, sealed.info.encode())]
        for what, name, index, data in pieces:
            said.append((Kind.PART, {"items": [[what, name, index, len(data)]]}, data))
    return [*said, (Kind.END, {}, b"")]


def answered(said: list[tuple[Kind, dict[str, Any], bytes]]) -> tuple[MemoryTier, list[Kind]]:
    """What an agent makes of frames that all come at once; its tier, and kinds of its answers."""
    tier = MemoryTier()
    calls = Calls({"ram": tier})
    here, there = socket.socketpair()
    data = b"".join(
        wire.encode(kind, number, head, len(payload)) + payload
        for number, (kind, head, payload) in enumerate(said)
    )
    here.sendall(data)
    here.shutdown(socket.SHUT_WR)
    channel, back = Channel(there, LIMITS), Channel(here, LIMITS)
    kinds: list[Kind] = []
    try:
        while True:
            calls.answer(channel, channel.receive(), PEER)
    except ChannelError:
        there.close()
    try:
        while True:
            frame = back.receive()
            back.skip(frame)
            kinds.append(frame.kind)
    except ChannelError:
        here.close()
    for key in tier.list(""):
        verify_record(fetch(tier, key))
    return tier, kinds


@settings(max_examples=150)
@given(st.lists(frames, max_size=6))
def test_any_frames(said: list[tuple[Kind, dict[str, Any], bytes]]) -> None:
    """Nothing but an answer, an error or an end comes of them."""
    tier, kinds = answered(said)
    assert set(kinds) <= {Kind.ANSWER, Kind.PART, Kind.ERROR}
    assert not list(tier.list(""))


@settings(max_examples=150)
@given(st.data())
def test_a_put_with_changes(data: st.DataObject) -> None:
    """Frames lost, doubled, exchanged and changed: all records of the put are there, or none."""
    said = whole_put()
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(said) - 1))
        kind, head, payload = said[at]
        match data.draw(st.sampled_from(["lose", "double", "move", "payload", "items", "kind"])):
            case "lose":
                del said[at]
            case "double":
                said.insert(at, said[at])
            case "move":
                said.insert(data.draw(st.integers(0, len(said) - 1)), said.pop(at))
            case "payload":
                said[at] = (kind, head, data.draw(st.binary(max_size=120)))
            case "items":
                said[at] = (kind, {**head, "items": data.draw(values)}, payload)
            case "kind":
                said[at] = (data.draw(st.sampled_from(Kind)), head, payload)
    tier, kinds = answered(said)
    held = set(tier.list(""))
    assert held in (set(), {source.key for source in SOURCES})
    assert held or Kind.ANSWER not in kinds  # an END may be lost, and with it the answer


def test_the_put_without_changes() -> None:
    """What the test above changes is a good put."""
    tier, kinds = answered(whole_put())
    assert kinds == [Kind.ANSWER]
    assert set(tier.list("")) == {source.key for source in SOURCES}
