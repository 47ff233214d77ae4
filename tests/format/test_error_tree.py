"""The tree of errors: as drawn, with a place and a hint in every message."""

import re

import pytest

from adacheck_store.format import errors
from adacheck_store.format.errors import AdaCheckError, MalformedError


def drawn_parents() -> dict[str, str]:
    """Class -> parent, as the docstring draws them."""
    assert errors.__doc__
    tree = errors.__doc__.partition("::")[2]
    path: list[str] = []
    parents: dict[str, str] = {}
    for line in tree.strip("\n").splitlines():
        match = re.fullmatch(r"    ((?:[│ ]   )*)([├└]── )?(\w+) .*", line)
        assert match, line
        depth = len(match[1]) // 4 + bool(match[2])
        path[depth:] = [match[3]]
        parents[match[3]] = path[depth - 1] if depth else "Exception"
    return parents


def classes() -> list[type[AdaCheckError]]:
    """Every class of the module."""
    found = [item for item in vars(errors).values() if isinstance(item, type)]
    return [item for item in found if issubclass(item, AdaCheckError)]


def test_tree_is_as_drawn() -> None:
    """The docstring's tree names every class, and each below its only base."""
    assert drawn_parents() == {item.__name__: item.__bases__[0].__name__ for item in classes()}
    assert all(len(item.__bases__) == 1 for item in classes())


def test_root_is_no_builtin_error() -> None:
    """Who catches ValueError does not catch ours by accident."""
    assert AdaCheckError.__bases__ == (Exception,)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_message_says_where_and_what_next(kind: type[AdaCheckError]) -> None:
    """The text carries every known place, in one order, and the hint."""
    error = kind("it broke", hint="do this", key="a/b", step=0, run="r", part="")
    assert str(error.at(run="other", tier="lmdb", term=None)) == (
        "it broke [run=r step=0 tier=lmdb key=a/b] -> do this"
    )
    assert error.place == {"run": "r", "step": 0, "key": "a/b", "tier": "lmdb"}
    assert str(kind("it broke")) == "it broke"
    assert kind.exit_code in {1, 2, 3}
    assert (kind.__doc__ or "").splitlines()[0].endswith(".")


def test_unknown_place_is_refused() -> None:
    """A misspelt place would be lost silently."""
    with pytest.raises(TypeError, match="stpe"):
        AdaCheckError("it broke", stpe=1)
    with pytest.raises(TypeError, match="stpe"):
        AdaCheckError("it broke").at(stpe=1)


def test_malformed_names_its_rule() -> None:
    """A broken rule has a short name."""
    assert MalformedError("it broke", rule="place").rule == "place"
