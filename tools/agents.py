"""What the living agents of a run say: of themselves, of every chain they hold, of their drains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from adacheck_store.agent import places
from adacheck_store.agent.messages import read_json
from adacheck_store.format.errors import AdaCheckError, TierUnavailableError, UsageError
from adacheck_store.tiers import credentials as keys
from adacheck_store.tiers.base import Tier, TierTraits
from adacheck_store.tiers.channel import Limits
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.s3_client import requests_in

CALL_S = 3.0
"""Time limit for one agent's answer."""

_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """A living agent. ``watermark``: the newest step that all holders of all chains have.

    ``memory`` is what its process may take, ``resident`` what it takes; of that records may take
    ``room`` and take ``used`` (bytes). ``last_error`` is the newest of all, with its age.
    """

    run: str
    node: str
    pid: int
    version: str
    term: str
    watermark: int
    trainers: int
    memory: int
    resident: int
    room: int
    used: int
    at: tuple[str, ...]
    metrics: str
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRow:
    """A part, or a rank's extras, at an agent; steps are -1 where there is none.

    ``replica_step``: folded up to there; ``newest_step``: the newest that this agent can produce
    alone. ``exposed``: fewer than k+1 live holders can produce the newest. ``holders`` and the
    newest step of each; ``silent`` ones have not been heard of lately. ``nbytes`` by place.
    """

    run: str
    node: str
    chain: str
    replica_step: int
    newest_step: int
    watermark: int
    exposed: bool
    nbytes: Mapping[str, int]
    holders: Mapping[str, int]
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRow:
    """The way from an agent to a lower place: what waits, how far behind it is, what is wrong.

    ``busy_s``: how long one drain has been under way; ``pause_s``: the pause between tries while
    it fails; ``requests``: those made to an S3 store; ``error``: the last one, with its age.
    """

    run: str
    node: str
    place: str
    records: int
    nbytes: int
    lag_steps: int
    lag_s: float
    drained: int
    requests: int
    busy_s: float
    pause_s: float
    error: str


Row = AgentRow | ChainRow | DrainRow


@dataclass(slots=True)
class Met:
    """Agents that have answered, and who did not answer.

    ``memories`` are of those on this node, ``others`` memories and LMDBs of those on other nodes.
    """

    said: list[dict[str, Any]] = field(default_factory=list)
    memories: list[Tier] = field(default_factory=list)
    others: list[Tier] = field(default_factory=list)
    silent: dict[str, AdaCheckError] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """A row for each agent, chain and drain."""
        for said in self.said:
            yield _agent(said)
        for said in self.said:
            yield from _chains(said)
        for said in self.said:
            yield from _drains(said)


@contextmanager
def meet(url: str, run: str) -> Iterator[Met]:
    """Ask this user's agents of a run on this node, and by its key those they know of."""
    met = Met()
    with ExitStack() as stack:
        own: dict[str, Peer] = {}
        for place in _own(url, run):
            peer = Peer(place.socket, run=run, limits=Limits(connect_s=CALL_S))
            stack.callback(peer.close)
            own[str(place.read_info().get("node", place.folder.name))] = peer
        _ask(met, own)
        met.memories += [_tier(own, said, "ram", "agent") for said in met.said]
        known = {name: peer["endpoint"] for said in met.said for name, peer in said["peers"].items()
                 if peer["endpoint"] and name not in own}  # fmt: skip
        if known:
            key = keys.read(places.keys_folder(), run)
            others = {name: _other(at, key, stack) for name, at in sorted(known.items())}
            near = len(met.said)
            _ask(met, others)
            met.others += [
                _tier(others, said, tier, word)
                for tier, word in (("ram", "agent"), ("lmdb", "lmdb of"))
                for said in met.said[near:]
            ]  # fmt: skip
        yield met


def _tier(peers: Mapping[str, Peer], said: Mapping[str, Any], tier: str, word: str) -> Tier:
    """What an agent that has answered holds in a place, to read from."""
    node = said["node"]
    return PeerTier(peers[node], tier, TierTraits(name=f"{word} {node}"), shared=True)


def _own(url: str, run: str) -> list[places.Place]:
    try:
        store = places.store_name(url)
    except UsageError:
        return []  # memory://, which has no agents
    return [
        place for place in places.places()
        if (info := place.read_info()).get("store") == store and info.get("run") == run
        and places.alive(place)
    ]  # fmt: skip


def _other(endpoint: str, key: Credentials, stack: ExitStack) -> Peer:
    peer = Peer(endpoint, credentials=key, limits=Limits(connect_s=CALL_S))
    stack.callback(peer.close)
    return peer


def _ask(met: Met, peers: Mapping[str, Peer]) -> None:
    """Ask all at once; who does not answer in time is noted."""

    def status(peer: Peer) -> dict[str, Any] | AdaCheckError:
        try:
            return read_json(peer.call("status", timeout_s=CALL_S)[1])
        except AdaCheckError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for name, answer in zip(peers, threads.map(status, peers.values()), strict=True):
            if not isinstance(answer, AdaCheckError) and answer.get("node") != name:
                answer = TierUnavailableError(f"another agent, {answer.get('node')!r}, is there")
            if isinstance(answer, AdaCheckError):
                met.silent[name] = answer
            else:
                met.said.append(answer)


def _agent(said: Mapping[str, Any]) -> AgentRow:
    memory = said["memory"]
    return AgentRow(
        run=said["run"], node=said["node"], pid=said["pid"], version=said["version"],
        term=said["term"], watermark=said["watermark"], trainers=len(said["trainers"]),
        memory=memory["limit"], resident=memory["resident"], room=memory["room"],
        used=memory["used"], at=tuple(said["endpoints"]), metrics=said["metrics"],
        last_error=_last(said["last_errors"], said["last_errors"]),
    )  # fmt: skip


def _chains(said: Mapping[str, Any]) -> Iterator[ChainRow]:
    for name, chain in said["chains"].items():
        holders = chain["holders"]
        yield ChainRow(
            run=said["run"], node=said["node"], chain=name, replica_step=chain["replica_step"],
            newest_step=chain["newest_step"], watermark=said["watermark"],
            exposed=chain["exposed"], nbytes=chain["bytes"],
            holders={holder: mark["newest"] for holder, mark in holders.items()},
            silent=tuple(holder for holder, mark in holders.items() if not mark["live"]),
        )  # fmt: skip


def _drains(said: Mapping[str, Any]) -> Iterator[DrainRow]:
    for place, drain in said["drains"].items():
        yield DrainRow(
            run=said["run"], node=said["node"], place=place, records=drain["waiting_records"],
            nbytes=drain["waiting_bytes"], lag_steps=drain["lag_steps"], lag_s=drain["lag_s"],
            drained=drain["drained_bytes"], requests=requests_in(drain["requests"]),
            busy_s=drain["busy_s"], pause_s=drain["pause_s"],
            error=_last(said["last_errors"], [f"drain-{place}"]),
        )  # fmt: skip


def _last(errors: Mapping[str, Mapping[str, Any]], works: Sequence[str] | Mapping[str, Any]) -> str:
    """The newest error of some works, as text."""
    found = [(error["ago_s"], work, error) for work, error in errors.items() if work in works]
    if not found:
        return ""
    ago_s, work, error = min(found, key=lambda item: item[:2])
    state = "fails" if error["now"] else "failed"
    return f"{work} {state}, last {ago_s:g} s ago: {error['error']}"
