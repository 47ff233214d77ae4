"""The metrics: what an agent's status says, for Prometheus, at an address of their own.

Plain HTTP that anybody may read who reaches the address: numbers and names, no records.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from adacheck_store.format.errors import TierBusyError
from adacheck_store.tiers.endpoint import Endpoint

SCRAPES = 8
"""Scrapes at a time; one more makes the oldest end."""

STALL_S = 5.0
"""How long a scraper may take for its next byte."""

FRESH_S = 0.5
"""For so long one look at the agent serves all: scrapers do not hold its lock by their number."""

_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves what ``look`` says (see `news.status`) until closed."""

    def __init__(self, at: Endpoint, look: Callable[[], Mapping[str, Any]]) -> None:
        """Listen; port 0 becomes the one in use. Raises `TierBusyError` where that cannot be."""
        registry = CollectorRegistry()
        registry.register(_Look(look))
        try:
            self._http = _http_server(at)
        except OSError as error:
            raise TierBusyError(
                f"cannot serve metrics at {at.host}:{at.port}: {error}",
                hint="another process may have the port; name another one for --metrics, or 0 for "
                "any",
            ) from error
        self._http.set_app(make_wsgi_app(registry))
        host = f"[{at.host}]" if ":" in at.host else at.host
        self.url = f"http://{host}:{self._http.server_port}/metrics"
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="adacheck-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the scrapes under way."""
        self._http.shutdown()
        self._http.end_all()
        self._http.server_close()
        self._thread.join(timeout=STALL_S)


class _Http(ThreadingMixIn, WSGIServer):
    """A thread for each scrape, a bounded number of them, and none is waited for."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Bind, and ask no name server who we are, as the standard library's would."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()
        self._scrapes: dict[socket.socket, None] = {}
        self._slots = threading.BoundedSemaphore(2 * SCRAPES)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a scrape; the oldest one ends if there are too many."""
        if len(self._scrapes) >= SCRAPES:
            self._end(next(iter(self._scrapes), request))
        if not self._slots.acquire(timeout=1.0):  # those that have ended wait for the agent
            self.shutdown_request(request)
            return
        self._scrapes[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one scrape, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._scrapes.pop(request, None)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up or stalls is not worth a line of the agent's log."""
        stalled = isinstance(sys.exception(), OSError)
        level = logging.DEBUG if stalled else logging.ERROR
        _log.log(level, "a scrape from %s failed", client_address, exc_info=True)

    def end_all(self) -> None:
        """End all scrapes."""
        for request in list(self._scrapes):
            self._end(request)

    def _end(self, request: socket.socket) -> None:
        self._scrapes.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Http6(_Http):
    address_family = socket.AF_INET6


class _Scrape(WSGIRequestHandler):
    timeout = STALL_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: scrapes come by the second."""


def _http_server(at: Endpoint) -> _Http:
    made = _Http6 if ":" in at.host else _Http
    return made((at.host, at.port), _Scrape)


class _Look(Collector):
    """Looks at the agent for a scrape; one look at a time, and none that is younger is repeated."""

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._seen: Mapping[str, Any] = {}
        self._seen_at = float("-inf")

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        with self._lock:
            if time.monotonic() - self._seen_at > FRESH_S:
                self._seen = self._look()
                self._seen_at = time.monotonic()
            seen = self._seen
        yield from families(seen)


class _Families:
    """Metrics by name, each with the run and the node as its first labels."""

    def __init__(self, run: str, node: str) -> None:
        self._first = (run, node)
        self.made: dict[str, Metric] = {}

    def gauge(self, name: str, what: str, value: float, **labels: str) -> None:
        family = self._family(GaugeMetricFamily, name, what, labels)
        family.add_metric([*self._first, *labels.values()], value)

    def count(self, name: str, what: str, value: float, **labels: str) -> None:
        family = self._family(CounterMetricFamily, name, what, labels)
        family.add_metric([*self._first, *labels.values()], value)

    def info(self, name: str, what: str, value: dict[str, str], **labels: str) -> None:
        family = self._family(InfoMetricFamily, name, what, labels)
        family.add_metric([*self._first, *labels.values()], value)

    def _family(self, kind: Any, name: str, what: str, labels: Mapping[str, str]) -> Any:
        if name not in self.made:
            self.made[name] = kind(f"adacheck_{name}", what, labels=["run", "node", *labels])
        return self.made[name]


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics that an agent's status is. Steps are -1 where there is none."""
    found = _Families(status["run"], status["node"])
    about = {name: str(status[name]) for name in ("version", "boot", "term", "domain")}
    found.info("agent", "Who the agent is.", about)
    found.gauge("watermark_step", "Newest step that all holders have.", status["watermark"])
    found.gauge("trainers", "Trainers connected.", len(status["trainers"]))
    memory = status["memory"]
    for name, what in MEMORY.items():
        found.gauge(f"memory_{name}_bytes", what, memory[name])
    for chain, said in status["chains"].items():
        _chain(found, chain, said)
    for place, said in status["drains"].items():
        _drain(found, place, said)
    for peer, said in status["peers"].items():
        found.gauge("peer_live", "1 if the peer has been heard of lately.", said["live"], peer=peer)
        found.gauge("peer_silent_seconds", "Since the peer was heard.", said["silent_s"], peer=peer)
    for work, said in status["last_errors"].items():
        found.gauge("failing", "1 while this work fails.", said["now"], work=work)
        found.gauge("last_error_age_seconds", "Since it failed.", said["ago_s"], work=work)
        found.info("last_error", "What it said.", {"error": said["error"][:200]}, work=work)
    yield from found.made.values()


MEMORY = {
    "limit": "What the process may take.", "resident": "What the process takes.",
    "room": "What records may take.", "reserved": "What is reserved for the run's chains.",
    "used": "What records take.",
}  # fmt: skip


def _chain(found: _Families, chain: str, said: Mapping[str, Any]) -> None:
    found.gauge(
        "replica_step", "Newest base held: folded up to there.", said["replica_step"], chain=chain
    )
    found.gauge("newest_step", "Newest step that can be produced here.", said["newest_step"],
                chain=chain)  # fmt: skip
    found.gauge("exposed", "1 if fewer than k+1 live holders can produce the newest step.",
                said["exposed"], chain=chain)  # fmt: skip
    found.gauge("records", "Records held.", said["records"], chain=chain)
    for place, size in said["bytes"].items():
        found.gauge("bytes", "Bytes of records.", size, chain=chain, place=place)
    live = sum(holder["live"] for holder in said["holders"].values())
    found.gauge("holders_live", "Holders that live.", live, chain=chain)
    for holder, mark in said["holders"].items():
        found.gauge("holder_newest_step", "Newest step that a holder can produce.", mark["newest"],
                    chain=chain, holder=holder)  # fmt: skip


def _drain(found: _Families, place: str, said: Mapping[str, Any]) -> None:
    for name, what in {
        "waiting_records": "Records that wait.", "waiting_bytes": "Bytes that wait.",
        "lag_steps": "Steps that the place is behind.",
        "lag_seconds": "Age of what has waited longest.",
        "busy_seconds": "How long one drain has been under way.",
        "pause_seconds": "Pause before the next try, while it fails.",
    }.items():  # fmt: skip
        value = said[name.replace("seconds", "s")]
        found.gauge(f"drain_{name}", what, value, place=place)
    found.count("drained_bytes", "Bytes drained.", said["drained_bytes"], place=place)
    for kind, number in said["requests"].items():
        if kind.startswith("bytes "):
            way = kind.removeprefix("bytes ")
            found.count("request_bytes", "Bytes of requests.", number, place=place, way=way)
        else:
            found.count("requests", "Requests, by kind.", number, place=place, kind=kind)
