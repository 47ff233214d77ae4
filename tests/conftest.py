"""Options and hooks of the whole test run."""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import settings

# Machines under test are slow and shared: a deadline per example would only measure their load.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")

DESELECTED = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fail-on-skip and --seeds."""
    parser.addoption(
        "--seeds", type=int, default=10**6, help="histories of the slow simulation (tests/sim)"
    )
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="fail the run if a selected test was skipped, for instance for want of a service",
    )


def lacking() -> dict[str, str]:
    """Markers of tests that cannot run on this machine, and why."""
    found = {}
    if not torch.cuda.is_available():
        found["gpu"] = "torch sees no CUDA device here"
    if find_spec("deepspeed") is None:
        found["deepspeed"] = "DeepSpeed is not installed: pip install adacheck-store[deepspeed]"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        found["vectors"] = "torch has no other arithmetic than the default on this CPU"
    return found


LACKING = lacking()


def pytest_configure(config: pytest.Config) -> None:
    """Start counting what the markers leave out."""
    config.stash[DESELECTED] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out for which the machine lacks something: they are not run, and not skipped."""
    lacking = [item for item in items if any(map(item.get_closest_marker, LACKING))]
    if lacking:
        items[:] = [item for item in items if item not in set(lacking)]
        config.hook.pytest_deselected(items=lacking)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the slow and gpu tests that are not run."""
    for item in items:
        for marker in (*LACKING, "slow"):
            if item.get_closest_marker(marker):
                item.config.stash[DESELECTED][marker] += 1


def skipped(config: pytest.Config) -> int:
    """Return how many selected tests were skipped."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", ())) if reporter else 0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of a parallel run has left out: all leave the same out."""
    left = getattr(node, "workeroutput", {}).get("deselected", {})
    node.config.stash[DESELECTED] |= Counter(left)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Turn a run with skips into a failure where that was asked for."""
    if hasattr(session.config, "workeroutput"):  # this process is a worker of a parallel run
        session.config.workeroutput["deselected"] = dict(session.config.stash[DESELECTED])
    wanted = session.config.getoption("--fail-on-skip")
    if wanted and exitstatus == pytest.ExitCode.OK and skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was not run, so that nobody takes silence for success."""
    counts = config.stash[DESELECTED]
    for marker, why in (*LACKING.items(), ("slow", "-m slow runs them")):
        terminalreporter.write_line(f"{counts[marker]} {marker} tests were not run ({why})")
    if config.getoption("--fail-on-skip") and skipped(config):
        count = skipped(config)
        terminalreporter.write_line(f"{count} tests were skipped: failed by --fail-on-skip")
