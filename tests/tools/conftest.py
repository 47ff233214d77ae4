"""One store is trained for all tests of the tools; each test damages a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.core.toy import Toy
from tests.ranks.worker import Launcher
from tests.tools.stores import FIRST, LAST, LOCK, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Toy]:
    """A store with two terms, and the trainer as it stood at the last step."""
    root = tmp_path_factory.mktemp("trained") / "store"
    train(str(root), FIRST)
    toy = train(str(root), LAST)
    return root, toy


@pytest.fixture
def store(trained: tuple[Path, Toy], tmp_path: Path) -> Path:
    """A copy of the trained store, in a folder with a name that needs care."""
    target = tmp_path / "a b" / "专家"
    target.parent.mkdir()
    shutil.copytree(trained[0], target, ignore=shutil.ignore_patterns(LOCK))
    return target


@pytest.fixture
def toy(trained: tuple[Path, Toy]) -> Toy:
    """The trainer as it stood at the last step."""
    return trained[1]


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that two ranks of FSDP2 have trained into, with shards that do not divide."""
    folder = tmp_path_factory.mktemp("sharded")
    launcher = Launcher(folder, "fsdp", 2)  # hosts the rendezvous while it lives
    assert launcher.start(folder / "store").wait() == [0, 0]
    return folder / "store"
