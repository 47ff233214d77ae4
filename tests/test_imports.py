"""What an import costs, and under which names the folders may be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import adacheck_store

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("format", "tiers", "trainer_hooks", "tools")
HEAVY = {"torch", "lmdb", "zarr", "boto3"}

LOADED = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
if sys.argv[2:] == ["whole"]:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter in the clone, which puts the clone on its path."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [("adacheck_store",), ("adacheck_store.format",), ("adacheck_store.format", "whole")],
)
def test_light_imports_load_no_heavy_library(arguments: tuple[str, ...]) -> None:
    """Neither the package itself nor any module of format loads torch or a storage library."""
    result = python("-c", LOADED, *arguments)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "adacheck_store" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_name_is_refused(folder: str) -> None:
    """The root folders exist under one name only."""
    result = python("-c", f"import {folder}")
    assert result.returncode != 0
    assert f"ImportError: import adacheck_store.{folder}" in result.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_gives_the_folder_its_real_name(folder: str) -> None:
    """A bare clone finds each folder inside adacheck_store through a relative link."""
    link = ROOT / "adacheck_store" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert link.resolve() == ROOT / folder


def test_lazy_names_load() -> None:
    """Every public name comes from the module that defines it and is then kept."""
    for name in adacheck_store.__all__:
        value = getattr(adacheck_store, name)
        assert getattr(adacheck_store, name) is value
        assert name in dir(adacheck_store)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist fails as on any module."""
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = adacheck_store.atach


def test_what_the_profile_wraps_is_there() -> None:
    """Benchmarks are run by hand: a name that has moved on would be found late."""
    from tests.benchmarks.profile import WORK

    gone = [name for places in WORK.values() for owner, name in places if name not in vars(owner)]
    assert not gone
