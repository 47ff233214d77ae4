"""Control calls: what an agent answers besides the calls on its tiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from adacheck_store.config import Settings
from adacheck_store.format.errors import MalformedError, PeerRefusedError, UnsupportedError
from adacheck_store.policy import Retention
from adacheck_store.tiers.credentials import Credentials
from adacheck_store.tiers.serve_calls import PeerInfo

from . import events as ev
from .door import refusal
from .messages import opening_bytes, read_opening, report_bytes, to_bytes
from .news import news
from .shell import Shell

Answer = tuple[Mapping[str, Any], bytes]


class Control:
    """Answers control calls about one run.

    ``about`` says who this agent is, ``status`` how it is; ``trust`` takes the run's key; ``stop``
    ends the process, now or once all is drained.
    """

    def __init__(
        self, shell: Shell, about: Callable[[], dict[str, Any]],
        status: Callable[[], dict[str, Any]],
        trust: Callable[[Credentials], None], stop: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._shell, self._about, self._said, self._trust = shell, about, status, trust
        self._stop = stop
        self._near = {
            "open": self._open, "key": self._key, "news": self._news, "close": self._close,
            "flush": self._flush, "stop": self._end,
        }  # fmt: skip
        self._all = {
            "who": self._who, "ask": self._ask, "learn": self._learn, "report": self._report,
            "status": self._status,
        }  # fmt: skip

    def __call__(
        self, verb: str, head: Mapping[str, Any], payload: bytes, peer: PeerInfo
    ) -> Answer:  # fmt: skip
        """Answer a call; see `tiers.serve_calls.Control`."""
        call = self._all.get(verb)
        if call is None:
            call = self._near.get(verb)
            if call is not None and peer.proven:
                raise PeerRefusedError(
                    f"{verb!r} is for trainers of this node", hint="call that node's own agent"
                )
        if call is None:
            raise UnsupportedError(
                f"an agent without the call {verb[:100]!r}",
                hint="versions of agent and caller may differ: upgrade the older one",
            )
        return call(head, payload, peer)

    # For all ----------------------------------------------------------------------------------

    def _who(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        return {}, to_bytes(self._about())

    def _ask(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        self._shell.tell(ev.Asked(_text(head, "term")))
        return {}, b""

    def _learn(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        opened = self._shell.core.view.opened
        return {}, b"" if opened is None else opening_bytes(opened, self._shell.endpoints)

    def _report(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        shell = self._shell
        with shell.lock:
            term = _text(head, "term")
            at = head.get("at")
            if isinstance(at, str) and at:
                shell.endpoints[_text(head, "node")] = at
            if term != shell.core.view.term:
                shell.tell(ev.Called(_text(head, "node"), term))
            return {}, report_bytes(shell.core.view.report())

    def _status(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        return {}, to_bytes(self._said())

    # For this node's trainers -----------------------------------------------------------------

    def _open(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        shell, caller = self._shell, _text(head, "caller")
        opened, endpoints = read_opening(payload)
        settings = head.get("settings")
        if isinstance(settings, Mapping):
            shell.adapt(_settings(settings))
        answer = shell.open(opened, endpoints)
        error = refusal(shell, answer, run=shell.run, term=opened.term)
        if error is not None:
            raise error
        shell.admit_trainer(caller, peer)
        return {"boot": shell.boot}, b""

    def _key(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        self._trust(Credentials.load(payload))
        return {}, b""

    def _news(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        return {}, to_bytes(news(self._shell, _text(head, "part")))

    def _close(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        self._shell.close_trainer(_text(head, "caller"))
        return {}, b""

    def _flush(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        self._shell.hurry(bool(head.get("hurry", True)))
        return {"behind": self._shell.behind}, b""

    def _end(self, head: Mapping[str, Any], payload: bytes, peer: PeerInfo) -> Answer:
        self._stop(bool(head.get("now")))
        return {"behind": self._shell.behind}, b""


def _text(head: Mapping[str, Any], name: str) -> str:
    found = head.get(name)
    if not isinstance(found, str):
        raise MalformedError(f"no {name} in the call", rule="call")
    return found


def _settings(said: Mapping[str, Any]) -> Settings:
    known = {item.name for item in dataclasses.fields(Settings)}
    given = {name: value for name, value in said.items() if name in known}
    if isinstance(given.get("retention"), Mapping):
        rules = {item.name for item in dataclasses.fields(Retention)}
        given["retention"] = Retention(
            **{name: value for name, value in given["retention"].items() if name in rules}
        )
    return Settings(**given)
