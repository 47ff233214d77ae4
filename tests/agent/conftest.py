"""Nodes that end with their test, and one thread for torch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.agent.kit import Node


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
