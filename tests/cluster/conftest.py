"""Clusters that end with their test; and what their nodes were, in the summary of the run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit import Cluster
from tests.cluster.network import network
from tests.ranks.worker import Launcher

HOW = pytest.StashKey[str]()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster for a run of a kind and so many ranks, with its uninterrupted run."""
    with ExitStack() as stack:

        def make(
            kind: str, ranks: int, sizes: dict[str, int], *,
            ways: tuple[tuple[str, ...], ...] | None = None, **config: Any,
        ) -> Cluster:  # fmt: skip
            net = stack.enter_context(network(ways))
            request.config.stash[HOW] = net.how
            reference = Launcher(tmp_path, kind, ranks).reference(**sizes)
            made = Cluster(tmp_path, net, kind, sizes, reference, **config)
            stack.callback(made.end)
            return made

        yield make


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what the nodes were: where the kernel makes none they share its network."""
    how = config.stash.get(HOW, "")
    if how:
        terminalreporter.write_line(f"the nodes of tests/cluster were {how}")
