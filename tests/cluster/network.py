"""Networks of the kernel's own: a node is a network namespace with an address, on one bridge.

Root makes them in a namespace of its own; anybody else in a user namespace besides. Where the
kernel allows neither, nodes are addresses of the loopback (127.0.0.x), which is said by `how`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SUBNET = "10.77.0"


class Namespace:
    """A process that holds a network namespace, and ends with its standard input."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process, and so the namespace, by number."""
        return self.process.pid

    def stands(self) -> bool:
        """Wait until it has one; False if the kernel refuses."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{self.pid}/comm").read_text(encoding="ascii") == "cat\n":
                    return True
            time.sleep(0.005)
        return False

    def end(self) -> None:
        """Let it go."""
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.process.wait(10)


class Network:
    """Nodes by number, each with an address; ``how`` says what they are."""

    def __init__(self, ways: tuple[tuple[str, ...], ...] | None) -> None:
        if ways is None:
            ways = (("-n",), ("-Urn",)) if os.geteuid() == 0 else (("-Urn",),)
        self._held: list[Namespace] = []
        self._outer: Namespace | None = None
        self._nodes: dict[int, Namespace] = {}
        self.how = f"addresses of the loopback: {self._make(ways)}"
        if self._outer is not None:
            self.how = f"network namespaces (unshare {' '.join(self._way)})"

    def _make(self, ways: tuple[tuple[str, ...], ...]) -> str:
        """Make the namespace of the bridge; why there is none, if so."""
        why = ""
        for way in ways:
            space = Namespace(["unshare", *way])
            self._held.append(space)
            if not space.stands():
                why = (space.process.stderr.read() if space.process.stderr else "").strip()
                continue
            self._outer, self._way = space, way
            try:
                self._ip(space, "link add bridge0 type bridge")
                self._ip(space, "link set bridge0 up")
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                self._outer, why = None, f"no bridge: {error}"
                continue
            return ""
        return why

    def _enter(self, space: Namespace) -> list[str]:
        assert self._outer is not None
        user = ["-U", "--preserve-credentials"] if "U" in "".join(self._way) else []
        return ["nsenter", "-t", str(space.pid), *user, "-n"]

    def _ip(self, space: Namespace, words: str) -> None:
        subprocess.run(
            [*self._enter(space), "ip", *words.split()], check=True, capture_output=True, timeout=20
        )

    def add(self, number: int) -> None:
        """Make a node (1 to 200)."""
        if self._outer is None:
            return
        node = Namespace([*self._enter(self._outer), "unshare", "-n"])
        self._held.append(node)
        assert node.stands(), "the kernel makes no further namespace"
        self._nodes[number] = node
        self._ip(self._outer, f"link add port{number} type veth peer name eth0 netns {node.pid}")
        self._ip(self._outer, f"link set port{number} master bridge0 up")
        self._ip(node, f"addr add {SUBNET}.{number}/24 dev eth0")
        self._ip(node, "link set eth0 up")
        self._ip(node, "link set lo up")

    def cut(self, number: int) -> None:
        """Pull a node's plug: not a packet of it arrives any more."""
        if self._outer is not None:
            self._ip(self._outer, f"link set port{number} down")

    def mend(self, number: int) -> None:
        """Put it in again."""
        if self._outer is not None:
            self._ip(self._outer, f"link set port{number} up")

    def address(self, number: int) -> str:
        """Where a node is reached by the others."""
        return f"127.0.0.{number}" if self._outer is None else f"{SUBNET}.{number}"

    @property
    def interface(self) -> str:
        """The network interface of every node."""
        return "lo" if self._outer is None else "eth0"

    @property
    def counts(self) -> bool:
        """Whether a node's traffic with others is counted by the kernel."""
        return self._outer is not None

    def on(self, number: int) -> list[str]:
        """Words that make a command run on a node."""
        return [] if self._outer is None else self._enter(self._nodes[number])

    def inside(self, number: int) -> tuple[int, bool] | None:
        """A process in a node's namespaces, and whether a user's is one of them; None if none."""
        return None if self._outer is None else (self._nodes[number].pid, "U" in "".join(self._way))

    def end(self) -> None:
        """Let all namespaces go, which end with the last process in them."""
        for space in reversed(self._held):
            space.end()


@contextlib.contextmanager
def network(ways: tuple[tuple[str, ...], ...] | None = None) -> Iterator[Network]:
    """A network, while it is needed; ``ways`` are options of `unshare` to try (None: what fits)."""
    made = Network(ways)
    try:
        yield made
    finally:
        made.end()
