"""Failpoints stand wherever something becomes durable or visible."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck_store.format.errors import UsageError
from adacheck_store.tiers import failpoints

TIERS = Path(__file__).resolve().parents[2] / "tiers"
WRAPPERS = {"fsync", "fsync_path", "rename", "link", "unlink", "write", "delete_pages"}
OWN = {("durable.py", name) for name in ("fsync", "rename", "link", "unlink")}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of tiers/. A run's key is no record: what is torn there is refused."""
    for path in sorted(TIERS.glob("*.py")):
        if path.name == "credentials.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path.name, node


def decisive(call: ast.Call) -> bool:
    """Whether a call makes something durable or visible."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner == "os" and name in ("fsync", "fdatasync", "sync", "rename", "replace", "link"):
        return True
    if name == "begin":
        return any(k.arg == "write" and ast.unparse(k.value) == "True" for k in call.keywords)
    if name == "commit":
        return True
    return (name == "sync" and "env" in owner.split(".")[-1] and bool(call.args)) or (
        owner in ("shutil", "pathlib") and name == "move"
    )


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls below a node."""
    return (found for found in ast.walk(node) if isinstance(found, ast.Call))


def hits(function: ast.FunctionDef) -> dict[str, list[int]]:
    """Lines of the failpoints of a function, by side."""
    found: dict[str, list[int]] = {"before": [], "after": []}
    for call in calls(function):
        if ast.unparse(call.func) == "failpoints.hit":
            side = ast.unparse(call.args[0]).rstrip("'\"").rpartition(".")[2]
            found[side].append(call.lineno)
    return found


def test_every_decisive_step_has_failpoints() -> None:
    """Each fsync, rename, link, write transaction and sync stands between two failpoints."""
    seen = 0
    for name, function in functions():
        for call in calls(function):
            if decisive(call):
                seen += 1
                lines = hits(function)
                where = f"{name}:{call.lineno} {ast.unparse(call)[:60]}"
                # What a transaction does is done at its end, so its beginning need not be after.
                begins = ast.unparse(call.func).endswith("begin")
                assert any(begins or line < call.lineno for line in lines["before"]), where
                assert any(line > call.lineno for line in lines["after"]), where
    assert seen >= 7


def test_every_point_is_used_and_every_use_is_a_point() -> None:
    """The registry and the source agree."""
    used = set()
    for path in TIERS.glob("*.py"):
        if path.name == "failpoints.py":
            continue
        for call in calls(ast.parse(path.read_text())):
            target = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            target = call.func.id if isinstance(call.func, ast.Name) else target
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    text = argument.value
                    if target == "hit":
                        used.add(text.rpartition(".")[0])
                    elif target in WRAPPERS and text.partition(".")[0] in ("lmdb", "local"):
                        used.add(text)
    assert used == set(failpoints.POINTS)


def test_arming() -> None:
    """Specs are parsed; a raise happens once, at the count; nothing is armed by default."""
    failpoints.disarm()
    failpoints.hit("lmdb.head.before")
    failpoints.arm("lmdb.head.before:2=raise")
    failpoints.hit("lmdb.head.before")
    with pytest.raises(OSError, match=r"lmdb\.head\.before"):
        failpoints.hit("lmdb.head.before")
    failpoints.hit("lmdb.head.before")
    assert "lmdb.head.before" in failpoints.seen()
    failpoints.disarm()
    assert not failpoints.seen()
    for spec in ("none", "lmdb.head.before=stop", "lmdb.head.before:x", ""):
        with pytest.raises(UsageError):
            failpoints.arm(spec)
    with pytest.raises(UsageError):
        failpoints.hit("no.such")
    assert len(failpoints.names()) == 2 * len(failpoints.POINTS)


def test_kill() -> None:
    """The default action is SIGKILL."""
    code = (
        "from adacheck_store.tiers import failpoints; name = 'lmdb.sync.after'; "
        "failpoints.arm(name); failpoints.hit(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -9
    assert os.name == "posix"
