"""The crew: the agents of a run as one rank sees them. Its own, and those of the other nodes."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adacheck_store.config import Settings, node_name
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import AdaCheckError, UsageError
from adacheck_store.format.ids import new_nonce
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.format.layout import Layout
from adacheck_store.format.manifest import Manifest
from adacheck_store.group import Group, lead, share, together
from adacheck_store.nearness import Nearness
from adacheck_store.placement import Node, domains, place
from adacheck_store.store import Store, beside_agents
from adacheck_store.tiers import credentials as keys
from adacheck_store.tiers.base import Tier, TierTraits
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer

from . import places
from .door import HEAD_BYTES
from .events import Opened
from .leases import LEASE_S
from .marks import Seat
from .messages import opening_bytes, read_json
from .node_tier import NodeTier
from .options import AgentOptions, check_peers, read_label
from .start import check_version, ensure_agent
from .upkeep import AgentUpkeep

EXTRA_BYTES = 256 << 10
"""What is reserved for an extra; one that is larger takes free room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """How a run is to be held by agents.

    Fewer than k+1 failure domains are an error unless ``allow_degraded``. ``peers`` are endpoints
    of agents on nodes without trainers. The rest is for an agent that has to be started on this
    node: see `AgentOptions`. ``labels`` is a file with a line for each node, its name and its
    label, for where one set of arguments is for all nodes; it stands for ``domain``.
    """

    allow_degraded: bool = False
    memory: int = 0
    listen: str = ""
    metrics: str = ""
    domain: str = ""
    labels: str | os.PathLike[str] = ""
    idle_s: float = 600.0
    drain_rate: int = 0
    peers: tuple[str, ...] = ()
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        check_peers(self.peers)
        if self.domain and self.labels:
            raise UsageError("both a domain and a label file", hint="give one of the two")


class Crew:
    """The agents of a run, met. ``store`` has the own one as its near tier, and closes them all:
    they live on."""

    def __init__(
        self, url: str, run: str, group: Group, use: Agents, settings: Settings, *,
        cache: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        """Start the own agent where there is none, and meet the others; all ranks do this.

        Raises `UsageError` where there are too few failure domains, `TierUnavailableError`.
        """
        self._run, self._group, self._use, self._settings = run, group, use, settings
        self._peers: dict[str, Peer] = {}
        self._asking = threading.Event()
        self._renewer: threading.Thread | None = None
        found: list[Peer] = []

        def own() -> dict[str, Any]:
            """What may be wrong on one node alone is so here, where all ranks are told."""
            self._options = _options(url, run, use, cache)
            had_key = os.path.exists(keys.path_of(places.keys_folder(), run))
            peer, about = ensure_agent(self._options)
            found.append(peer)
            key = keys.read(places.keys_folder(), run)
            return {**about, "key": key.export().decode(), "had_key": had_key}

        try:
            self._abouts = share(group, "agents", own)
            self._key = self._agree_on_key(found[0])
            node = self._options.node
            self._placed = together(group, "placement", self._place)
            self.near = NodeTier(found[0], f"{rank_name(group.rank)}@{new_nonce()}", node)
            lower = PeerTier(found[0], "lmdb", TierTraits(name=f"lmdb of {node}"), shared=True)
            far, others = together(
                group, "lower tiers",
                lambda: beside_agents(url, run, cache, set(self._endpoints)),
            )  # fmt: skip
        except BaseException:
            for peer in [*found, *self._peers.values()]:
                peer.close()
            raise
        self.store = Store(url, self.near, far, (lower, *self._others(node), *others[0]), others[1])

    @property
    def near_to(self) -> Nearness:
        """To every node its own agent, with its LMDB; then all agents, and all LMDBs too."""
        memory = {name: f"agent {name}" for name in self._endpoints}
        disk = {name: f"lmdb of {name}" for name in self._endpoints}
        memories, disks = frozenset(memory.values()), frozenset(disk.values())
        return Nearness(
            here=self._options.node,
            places={
                name: (frozenset({memory[name]}), frozenset({memory[name], disk[name]}))
                for name in {about["node"] for about in self._abouts}
            },
            common=(memories, memories | disks),
        )

    def _agree_on_key(self, own: Peer) -> Credentials:
        """One key for the run: an existing one wins, since agents without trainers know it."""
        key = keys.choose(
            (Credentials.load(about["key"].encode()), bool(about["had_key"]))
            for about in self._abouts
        )
        share(self._group, "key", lambda: own.call("key", {}, key.export()) and None)
        return key

    def _place(self) -> Mapping[int, tuple[str, ...]]:
        """Who holds what: all ranks come to the same."""
        nodes = {about["node"]: about for about in self._abouts}
        for endpoint in self._use.peers:
            peer = Peer(endpoint, credentials=self._key)
            about = read_json(peer.call("who")[1])
            check_version(about)
            self._peers[about["node"]] = peer
            nodes[about["node"]] = about
        self._endpoints = {
            name: next((text for text in about["endpoints"] if text.startswith("tls:")), "")
            for name, about in nodes.items()
        }  # fmt: skip
        described = [
            Node(name=name, boot_id=about["boot_id"], label=about["domain"])
            for name, about in sorted(nodes.items())
        ]  # fmt: skip
        self._domains = domains(described)
        silent = sorted(name for name, endpoint in self._endpoints.items() if not endpoint)
        if silent and len(nodes) > 1:
            raise UsageError(
                f"the agents of {', '.join(silent)} are not reached from other nodes",
                run=self._run, hint="start them with --listen HOST:PORT",
            )  # fmt: skip
        homes = {rank: about["node"] for rank, about in enumerate(self._abouts)}
        placed = place(homes, described, self._settings.k, allow_degraded=self._use.allow_degraded)
        return placed.holders

    def _others(self, node: str) -> list[Tier]:
        """The tiers of the other agents, to read from: all memories, then all LMDBs."""
        names = sorted(name for name in self._endpoints if name != node)
        for name in names:
            if name not in self._peers:
                self._peers[name] = Peer(self._endpoints[name], credentials=self._key)
        return [
            PeerTier(
                self._peers[name], tier, TierTraits(name=f"{word} {name}"), shared=tier != "ram"
            )
            for tier, word in (("ram", "agent"), ("lmdb", "lmdb of")) for name in names
        ]  # fmt: skip

    def ask(self, term: str) -> None:
        """Have every agent keep what it has, from now until the term opens."""
        self._ask(term)
        if self._renewer is None:
            self._renewer = threading.Thread(
                target=self._renew, args=(term,), name="adacheck-lease", daemon=True
            )
            self._renewer.start()

    def _ask(self, term: str) -> None:
        for peer in [self.near.peer, *self._peers.values()]:
            try:
                peer.call("ask", {"term": term}, timeout_s=3.0)
            except AdaCheckError:  # what it holds is not read either, and a trouble of the catalog
                continue

    def _renew(self, term: str) -> None:
        while not self._asking.wait(LEASE_S / 3) and not self.near.closed:
            self._ask(term)

    def open(self, manifest: Manifest, known: Mapping[str, Manifest], layout: Layout) -> None:
        """Tell the own agent of the term; every rank does this."""
        sizes = share(self._group, "sizes", lambda: list(chain_bytes(layout)))
        reserve = {}
        for rank, (base, delta) in enumerate(sizes):
            reserve[part_name(rank)] = (base, delta)
            reserve[rank_name(rank)] = (0, EXTRA_BYTES)
        opened = Opened(
            term=manifest.term, manifests={**known, manifest.seal().id: manifest},
            seats={
                name(rank): Seat(0, holders)
                for rank, holders in self._placed.items() for name in (part_name, rank_name)
            },
            domains=self._domains, k=self._settings.k, reserve=reserve,
        )  # fmt: skip
        settings = dataclasses.asdict(self._settings)
        opening = lead(  # rank 0 alone knows the manifests before
            self._group, "opening", lambda: opening_bytes(opened, self._endpoints),
            encode=lambda data: data.decode(), decode=lambda text: str(text).encode(),
        )  # fmt: skip
        self.near.open(opening, settings, manifest.seal().id)
        self._asking.set()

    def upkeep(
        self, manifest: Manifest, ask_for_base: Callable[[str, int], None]
    ) -> AgentUpkeep:  # fmt: skip
        """What stands for upkeep in a session of a term: the own agent does it."""
        return AgentUpkeep(
            self.near, run=self._run, term=manifest.term, step=manifest.step,
            part=part_name(self._group.rank), object_lag=self._settings.object_lag,
            ask_for_base=ask_for_base, revive=self._revive,
        )  # fmt: skip

    def _revive(self) -> None:
        """Start the own agent again, if it has died; a peer of ours has its key still."""
        peer, _ = ensure_agent(self._options)
        peer.close()


def _options(
    url: str, run: str, use: Agents, cache: str | os.PathLike[str] | None
) -> AgentOptions:  # fmt: skip
    """What an agent of this node is told, if one is to be started."""
    node = node_name()
    return AgentOptions(
        store=places.store_url(url), run=run, node=node,
        cache=str(Path(cache).absolute()) if cache else "", memory=use.memory, listen=use.listen,
        metrics=use.metrics, domain=read_label(use.labels, node) if use.labels else use.domain,
        idle_s=use.idle_s, drain_rate=use.drain_rate, grace_s=use.grace_s,
    )  # fmt: skip


def chain_bytes(layout: Layout) -> tuple[int, int]:
    """Bytes of a part's base, and of its largest delta: gradients as they are."""
    base = delta = HEAD_BYTES
    for section in layout.sections:
        base += section.elements * sum(item_bytes(kind) for _, kind in section.roles)
        delta += section.elements * item_bytes(section.dtypes[section.main_role])
    return base, delta
