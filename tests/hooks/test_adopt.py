"""What of an extra a rank takes over where ranks or sharding are not the chain's."""

from types import SimpleNamespace

import pytest

from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.trainer_hooks.adopt import adopted

TREE = {"rng": 1, "carried": 2, "loader": 3, "tracked": {}, "optimizers": {"0": {}}}


def restored(topology: str, alike: frozenset[str] | None):
    """As much of a `Restored` as is looked at."""
    return SimpleNamespace(
        certificate=SimpleNamespace(topology=topology), alike=alike, step=7
    )  # fmt: skip


@pytest.mark.parametrize("topology", ["", "written by 4 ranks"])
def test_a_rank_that_was_there_gets_all_that_it_had(topology):
    """Whatever it holds now."""
    assert adopted(restored(topology, None), TREE) == TREE


def test_a_new_rank_gets_what_is_nobodys():
    """Neither generators nor a batch that another one trains."""
    found = adopted(restored("moved", frozenset(TREE)), TREE)
    assert set(found) == {"loader", "tracked", "optimizers"}


def test_an_optimizer_that_is_another_on_each_rank_is_nobody_elses():
    """One that cannot be folded is kept whole, by each rank."""
    with pytest.raises(ModelMismatchError, match="has another state on each rank"):
        adopted(restored("moved", frozenset({"loader"})), TREE)


@pytest.mark.parametrize("alike", [None, frozenset(TREE)])
def test_gradients_that_wait_are_of_other_pieces(alike):
    """They are refused where pieces have moved, and else stay what they are."""
    tree = TREE | {"grads": {"w": 1}}
    with pytest.raises(UnsupportedError, match="gradients were accumulated"):
        adopted(restored("moved", alike), tree)
    assert adopted(restored("", None), tree) == tree
