"""Nodes that end with their test, a pair that knows each other, and one thread for torch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from adacheck_store.tiers import credentials
from tests.agent.kit import Node
from tests.agent.trainer import RUN


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Makes nodes of one store."""
    made: dict[str, Node] = {}

    def node(name: str) -> Node:
        return made.setdefault(name, Node(tmp_path, name))

    yield node
    for each in made.values():
        each.end()


@pytest.fixture
def here(nodes: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch) -> Node:
    """The node that this process is on."""
    found = nodes("a")
    found.here(monkeypatch)
    return found


@pytest.fixture
def pair(nodes: Callable[[str], Node], here: Node) -> tuple[Node, Node]:
    """This node with an agent yet to start, and another with one; both have the run's key."""
    other = nodes("b")
    key = credentials.make(RUN)
    for node in (here, other):
        node.runtime.mkdir(mode=0o700)
        credentials.write(str(node.runtime / "keys"), key)
    other.agent()
    return here, other
