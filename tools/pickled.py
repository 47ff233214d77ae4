"""A pickle read as data: what it would make is told; nothing is imported, called or made.

For the files of others that hold one though plain values are all that is in them.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adacheck_store.format.errors import MalformedError

_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip

_VALUES = (
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Thing:
    """An object that a pickle would make: of class or function ``name``, called with ``args``.

    ``state`` is what would be put into it. A class itself has neither.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None


class _Mark:
    pass


def read_pickle(data: bytes) -> Any:
    """What a pickle says, objects as `Thing`; raises `MalformedError` (rule ``pickle``)."""
    try:
        return _Reader().read(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"not a pickle of plain values: {error}"[:300], rule="pickle") from (
            error
        )


class _Reader:
    """The stack and the memo of the pickle machine."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        """Carry the instructions out, up to the last one."""
        for code, argument, _ in pickletools.genops(data):
            name = code.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _VALUES:
                self._stack.append(argument)
            elif name not in ("PROTO", "FRAME"):
                act: Callable[[Any], None] | None = getattr(self, f"_{name.lower()}", None)
                if act is None:
                    raise ValueError(f"instruction {name}")
                act(argument)
        raise ValueError("it has no end")

    def _marked(self) -> list[Any]:
        """What lies above the last mark."""
        at = max(i for i, item in enumerate(self._stack) if isinstance(item, _Mark))
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _mark(self, _: Any) -> None:
        self._stack.append(_Mark())

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binput(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _long_binput = _binput

    def _binget(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _long_binget = _binget

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    def _tuple1(self, _: Any) -> None:
        self._stack[-1:] = [tuple(self._stack[-1:])]

    def _tuple2(self, _: Any) -> None:
        self._stack[-2:] = [tuple(self._stack[-2:])]

    def _tuple3(self, _: Any) -> None:
        self._stack[-3:] = [tuple(self._stack[-3:])]

    def _append(self, _: Any) -> None:
        item = self._stack.pop()
        self._stack[-1].append(item)

    def _appends(self, _: Any) -> None:
        items = self._marked()
        self._stack[-1].extend(items)

    def _setitem(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._stack[-1][key] = value

    def _setitems(self, _: Any) -> None:
        items = self._marked()
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(Thing(f"{module}.{name}"))

    def _global(self, argument: str) -> None:
        self._stack.append(Thing(argument.replace(" ", ".")))

    def _reduce(self, _: Any) -> None:
        args, made = self._stack.pop(), self._stack.pop()
        self._stack.append(Thing(made.name, tuple(args)))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        self._stack[-1].state = state
