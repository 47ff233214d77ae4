"""What an agent is told when it is started; what cannot be is refused before anything is begun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from adacheck_store.format.errors import UsageError
from adacheck_store.format.keys import check_run
from adacheck_store.placement import check_label, parse_labels
from adacheck_store.tiers.endpoint import Endpoint

from .budget import LEAST_BYTES, MEBI


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told when it is started.

    ``memory``: bytes that the whole process may take (0: half of what is available). ``listen``
    as HOST:PORT for other nodes (empty: for this node alone), ``metrics`` as HOST:PORT for
    Prometheus (empty: none). ``idle_s``: after how long without a trainer it ends, once all is
    drained (0: never). ``domain`` labels what fails together with this node. ``drain_rate`` caps
    what goes to the far tier, in bytes per second (0: nothing does). ``grace_s``: within how many
    seconds it ends after SIGTERM, whatever is undrained (0: when all is drained).
    """

    store: str
    run: str
    node: str = ""
    cache: str = ""
    memory: int = 0
    listen: str = ""
    metrics: str = ""
    idle_s: float = 0.0
    domain: str = ""
    drain_rate: int = 0
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        check_run(self.run)
        for name, kinds in (
            ("memory", int), ("drain_rate", int), ("idle_s", int | float), ("grace_s", int | float)
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= 0:
                raise UsageError(
                    f"{name}={value!r:.200} for an agent", hint="a number that is not negative"
                )
        if self.memory and self.memory < LEAST_BYTES:
            raise UsageError(
                f"--memory {self.memory}: too little for an agent",
                hint=f"at least {LEAST_BYTES // MEBI}M, of which the program itself takes most",
            )  # fmt: skip
        for option in ("listen", "metrics"):
            if text := getattr(self, option):
                listening(option, text)
        if self.domain:
            check_label(self.domain)


def listening(option: str, text: str) -> Endpoint:
    """HOST:PORT as an endpoint; raises `UsageError` that names the option."""
    try:
        return Endpoint.parse(f"tls://{text}")
    except UsageError as error:
        raise UsageError(
            f"--{option} {text[:200]!r}: not an address",
            hint="write HOST:PORT, such as 127.0.0.1:7070; port 0 takes any that is free",
        ) from error


def check_peers(peers: object) -> None:
    """Check endpoints of agents on other nodes; raises `UsageError` that names the one."""
    if not isinstance(peers, tuple | list):
        raise UsageError(f"peers={peers!r:.200}", hint="a tuple of endpoints, tls://HOST:PORT each")
    for number, text in enumerate(peers):
        try:
            good = isinstance(text, str) and Endpoint.parse(text).port > 0
        except UsageError:
            good = False
        if not good:
            raise UsageError(
                f"peers[{number}]={text!r:.200}: not where an agent is reached",
                hint="write tls://HOST:PORT, as that agent says it when it starts",
            )


def read_label(path: str | os.PathLike[str], node: str) -> str:
    """The label of a node in a file of labels; raises `UsageError`, naming file and line."""
    try:
        labels = parse_labels(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the label file cannot be read: {error}", path=str(path),
            hint="write a node's name and its label on each line, as UTF-8",
        ) from error  # fmt: skip
    except UsageError as error:
        raise error.at(path=str(path)) from error.__cause__
    if node not in labels:
        raise UsageError(
            f"the label file has no line for this node, {node}", path=str(path),
            hint="label every node; ADACHECK_NODE names a node",
        )  # fmt: skip
    return labels[node]
