"""The sdist and the wheel hold each file once, and the wheel works in a clean environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("format", "tiers", "trainer_hooks", "tools")
IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys, adacheck_store
home = pathlib.Path(adacheck_store.__file__)
assert home.is_relative_to(sys.prefix), home
names = [m.name for m in pkgutil.walk_packages(adacheck_store.__path__, "adacheck_store.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(*names)
"""


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command in a folder outside the clone and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= more
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def shipped_files() -> set[str]:
    """Return every file that an installation must hold, by its path below site-packages."""
    folders = {"adacheck_store": ROOT / "adacheck_store"}
    folders |= {f"adacheck_store/{name}": ROOT / name for name in FOLDERS}
    names = set()
    for prefix, folder in folders.items():
        for path in folder.rglob("*"):
            if path.suffix in {".py", ".md", ".json"} or path.name == "py.typed":
                names.add(f"{prefix}/{path.relative_to(folder).as_posix()}")
    return names


@pytest.fixture(scope="module", params=["with a compiler", "no compiler"])
def dist(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Build the sdist, and the wheel from it, from a copy that holds nothing but sources."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("adacheck_store", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for path in ROOT.glob("*.md"):
        shutil.copy(path, source / path.name)
    out: Path = tmp_path_factory.mktemp("dist") / request.param
    out.mkdir()
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    compiler = {"CC": "/bin/false"} if request.param.startswith("no") else {}
    run(*build, cwd=out, **compiler)
    return out


def test_wheel_holds_every_file_once(dist: Path) -> None:
    """The wheel holds exactly the files of the five folders, none twice through the links.

    The kernels are there where there is a compiler, and only there.
    """
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {f"adacheck_store/_kernels{suffix}"} if dist.name.startswith("with") else set()
    assert set(names) == shipped_files() | compiled


def test_sdist_holds_no_links(dist: Path) -> None:
    """The sdist holds the root folders as they are and nothing below the links."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    assert len(names) == len(set(names))
    assert not [n for n in names if n.startswith(tuple(f"adacheck_store/{f}" for f in FOLDERS))]
    assert {
        "adacheck_store/kernels.c",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "format/__init__.py",
    } <= set(names)


def test_wheel_works_in_a_clean_environment(dist: Path, tmp_path: Path) -> None:
    """An environment with the wheel alone, and this one's libraries, imports and runs it."""
    home = tmp_path / "clean"
    venv.create(home, with_pip=False)
    interpreter = home / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", interpreter)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=tmp_path)
    # Libraries come from this environment. Its own .pth files, and with them an editable
    # installation of the clone, are not read from a folder that a .pth file names.
    (packages,) = home.glob("lib/python*/site-packages")
    paths = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
    (packages / "libraries.pth").write_text("\n".join(sorted(paths)) + "\n")
    names = run(interpreter, "-c", IMPORT_ALL, cwd=tmp_path).split()
    assert {f"adacheck_store.{folder}" for folder in FOLDERS} <= set(names)
    assert "Usage: adacheck-store" in run(home / "bin" / "adacheck-store", "--help", cwd=tmp_path)
