"""Style as numbers: the rules of the code base that a walk over the syntax trees can check."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("adacheck_store", "format", "tiers", "trainer_hooks", "tools")

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 100

BARE_FOLDERS = {"format", "tiers", "trainer_hooks", "tools"}
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
VANILLA_ERRORS = {"BaseException", "Exception", "RuntimeError"}
BOUNDED_QUEUES = {"JoinableQueue", "LifoQueue", "PriorityQueue", "Queue"}
UNBOUNDED_QUEUES = {"SimpleQueue"}
BLOCKING_CALLS = {"get", "join", "wait"}
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A parsed source file."""

    name: str
    source: str
    tree: ast.Module


Finding = tuple[int, str]
Rule = Callable[[Module], Iterator[Finding]]


def modules() -> Iterator[Module]:
    """Yield every module of the five folders once; rglob does not follow the links."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            yield Module(name=name, source=source, tree=ast.parse(source, filename=name))


def calls(module: Module) -> Iterator[tuple[ast.Call, str, str]]:
    """Yield every call with the last name of what is called and the name before it."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)):
                yield node, attr, owner
            case ast.Call(func=ast.Attribute(attr=attr)):
                yield node, attr, ""
            case ast.Call(func=ast.Name(id=name)):
                yield node, name, ""


def keyword(call: ast.Call, name: str) -> object:
    """Return the constant a keyword is given, None if it is absent or computed."""
    for item in call.keywords:
        if item.arg == name and isinstance(item.value, ast.Constant):
            return item.value.value
    return None


def short_modules(module: Module) -> Iterator[Finding]:
    """Find modules over 400 lines."""
    count = len(module.source.splitlines())
    if count > MODULE_LINES_MAX:
        yield count, f"module has {count} lines, at most {MODULE_LINES_MAX}"


def short_functions(module: Module) -> Iterator[Finding]:
    """Find functions over 70 lines."""
    for node in ast.walk(module.tree):
        if isinstance(node, FUNCTION_TYPES):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {count} lines, at most {FUNCTION_LINES_MAX}"


def short_lines(module: Module) -> Iterator[Finding]:
    """Find lines over 100 characters."""
    for number, line in enumerate(module.source.splitlines(), 1):
        if len(line) > LINE_CHARACTERS_MAX:
            yield number, f"line has {len(line)} characters, at most {LINE_CHARACTERS_MAX}"


def imported(module: Module) -> Iterator[Finding]:
    """Yield the first part of every absolute import with its line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").partition(".")[0]


def real_names(module: Module) -> Iterator[Finding]:
    """Find root folders imported under their bare names."""
    for line, name in imported(module):
        if name in BARE_FOLDERS:
            yield line, f"imports {name}, not adacheck_store.{name}"


def no_pickle(module: Module) -> Iterator[Finding]:
    """Find everything that could run code out of stored bytes."""
    for line, name in imported(module):
        if name in PICKLERS:
            yield line, f"imports {name}"
    for call, name, owner in calls(module):
        if (name, owner) == ("load", "torch") and keyword(call, "weights_only") is not True:
            yield call.lineno, "torch.load without weights_only=True"
        if keyword(call, "allow_pickle"):
            yield call.lineno, "allow_pickle"


def typed_errors(module: Module) -> Iterator[Finding]:
    """Find errors raised as a class that no handler can tell apart."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
                if name in VANILLA_ERRORS:
                    yield node.lineno, f"raises {name}: raise an error of our own tree"


def bounded_waits(module: Module) -> Iterator[Finding]:
    """Find queues without a bound and waits without a timeout, as far as the syntax shows."""
    for call, name, _ in calls(module):
        if name in UNBOUNDED_QUEUES:
            yield call.lineno, f"{name} has no bound"
        elif name in BOUNDED_QUEUES and not call.args and not keyword_given(call, "maxsize"):
            yield call.lineno, f"{name}() without maxsize"
        elif name in BLOCKING_CALLS and isinstance(call.func, ast.Attribute):
            if not call.args and not call.keywords:
                yield call.lineno, f".{name}() without a timeout"


def keyword_given(call: ast.Call, name: str) -> bool:
    """Tell whether a call names a keyword with anything but 0."""
    return any(item.arg == name for item in call.keywords) and keyword(call, name) != 0


def documented(module: Module) -> Iterator[Finding]:
    """Find public modules, classes and functions without a docstring."""
    if ast.get_docstring(module.tree) is None:
        yield 1, "module has no docstring"
    for node in module.tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTION_TYPES)) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield node.lineno, f"{node.name} has no docstring"


def frozen_records(module: Module) -> Iterator[Finding]:
    """Find dataclasses of the format that could change after they were made."""
    if not module.name.startswith("format/"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(call, ast.Name | ast.Attribute) and "dataclass" in ast.unparse(call):
                    frozen = isinstance(decorator, ast.Call) and keyword(decorator, "frozen")
                    if not frozen:
                        yield node.lineno, f"{node.name} is a dataclass that is not frozen"


RULES: list[Rule] = [
    short_modules,
    short_functions,
    short_lines,
    real_names,
    no_pickle,
    typed_errors,
    bounded_waits,
    documented,
    frozen_records,
]

# One source a rule must find fault with: a rule that never fires proves nothing.
UNTIDY = [
    (short_modules, "x = 1\n" * 401),
    (short_functions, "def f():\n" + "    x = 1\n" * 70),
    (short_lines, "x = '" + "y" * 100 + "'\n"),
    (real_names, "import format\n"),
    (real_names, "from tiers.lmdb import x\n"),
    (no_pickle, "import pickle\n"),
    (no_pickle, "from dill import loads\n"),
    (no_pickle, "torch.load(path)\n"),
    (no_pickle, "torch.load(path, weights_only=False)\n"),
    (no_pickle, "numpy.load(path, allow_pickle=True)\n"),
    (typed_errors, "raise RuntimeError('lost')\n"),
    (typed_errors, "raise Exception\n"),
    (bounded_waits, "queue.Queue()\n"),
    (bounded_waits, "Queue(maxsize=0)\n"),
    (bounded_waits, "queue.SimpleQueue()\n"),
    (bounded_waits, "thread.join()\n"),
    (bounded_waits, "self.ready.wait()\n"),
    (bounded_waits, "item = self.queue.get()\n"),
    (documented, "x = 1\n"),
    (documented, "'''A module.'''\nclass A:\n    x = 1\n"),
    (documented, "'''A module.'''\ndef f():\n    return 1\n"),
    (frozen_records, "@dataclass\nclass A:\n    x: int\n"),
    (frozen_records, "@dataclasses.dataclass(slots=True)\nclass A:\n    x: int\n"),
]

TIDY = '''"""A module."""

import queue
from dataclasses import dataclass

from .ids import new_id


@dataclass(frozen=True)
class Head:
    """A head."""

    name: str


def work(jobs: queue.Queue) -> str:
    """Work."""
    jobs = queue.Queue(maxsize=2)
    jobs.get(timeout=1)
    torch.load(path, weights_only=True)
    raise ValueError(", ".join(dict(a=1).get("a")))
'''


def parse(source: str) -> Module:
    """Parse a source as if it stood in the format folder."""
    return Module(name="format/example.py", source=source, tree=ast.parse(source))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_is_tidy(rule: Rule) -> None:
    """No module of the five folders breaks the rule."""
    found = [f"{m.name}:{line}: {text}" for m in modules() for line, text in rule(m)]
    assert not found, "\n" + "\n".join(found)


def test_every_folder_is_walked() -> None:
    """The walk reaches all five folders and takes no file twice."""
    names = [module.name for module in modules()]
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == set(FOLDERS)


@pytest.mark.parametrize(("rule", "source"), UNTIDY)
def test_rule_finds_fault(rule: Rule, source: str) -> None:
    """Each rule fires where it should."""
    assert list(rule(parse(source)))


def test_no_rule_finds_fault_with_tidy_source() -> None:
    """Sound source passes every rule, and every rule has a case above."""
    assert not [finding for rule in RULES for finding in rule(parse(TIDY))]
    assert {rule for rule, _ in UNTIDY} == set(RULES)
