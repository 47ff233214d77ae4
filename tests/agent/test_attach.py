"""`attach(agents=...)`: what cannot be is refused on all ranks, before anything is made."""

import pytest
import torch

import adacheck_store as ada
from adacheck_store.format.errors import UsageError
from adacheck_store.tiers import credentials
from tests.agent.kit import Node
from tests.agent.trainer import MEMORY, RUN, open_session
from tests.ranks.worker import Launcher


@pytest.mark.parametrize(
    ("how", "said"),
    [({"agents": True}, "agents=True -> adacheck_store.Agents"),
     ({"agents": {"memory": 1}}, "agents={'memory': 1} -> adacheck_store.Agents"),
     ({"agents": ada.Agents(memory=-1)}, "memory=-1 for an agent -> a number"),
     ({"agents": ada.Agents(memory="1G")}, "memory='1G' for an agent -> a number"),
     ({"agents": ada.Agents(idle_s=-0.5)}, r"idle_s=-0.5 for an agent -> a number"),
     ({"agents": ada.Agents(drain_rate=True)}, "drain_rate=True for an agent -> a number"),
     ({"agents": ada.Agents(), "k": -1}, "k=-1 -> an integer of at least 0"),
     ({"agents": ada.Agents(), "lmdb_bytes": 1 << 30}, "lmdb_bytes=1073741824 with agents"),
     ({"agents": ada.Agents(), "store": "memory://"}, "an agent is another"),
     ({"agents": ada.Agents(listen="here")}, "--listen 'here': not an address")],
)  # fmt: skip
def test_arguments_that_cannot_be(here: Node, how, said):
    """One process: neither a store nor an agent is made."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError) as caught:
        ada.attach(model, optimizer, **{"run": "run", "store": here.url, **how})
    assert said in " ".join(str(caught.value).split())
    assert not here.store.exists()
    assert not here.alive()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Two ranks."""
    return Launcher(tmp_path_factory.mktemp("attach"), "plain", 2)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(None, {}, "agents is None on rank 0, (False, ()) on rank 1"),
     ({}, {"allow_degraded": True}, "agents is (False, ()) on rank 0, (True, ()) on rank 1"),
     ({}, {"listen": "here"}, "--listen 'here': not an address"),
     ({}, {"labels": "/nowhere"}, "the label file cannot be read"),
     ({}, {}, "k=1 needs 2 failure domains, and there are 1: a")],
)  # fmt: skip
def test_what_is_wrong_on_one_rank_is_told_on_all(launcher, here: Node, first, second, said):
    """None waits for one that has given up, and no rank is left with half a crew."""
    given = {
        rank: {"agents": use if use is None else ada.Agents(memory=MEMORY, **use), "run": "run"}
        for rank, use in enumerate((first, second))
    }
    attempt = launcher.start(here.store, given=given, env=here.env, node=here.name)
    assert attempt.wait() == [0, 0]
    assert all(said in text for text in attempt.every("refused")), attempt.every("refused")


def test_a_key_is_brought_as_new_or_as_known(here: Node, monkeypatch: pytest.MonkeyPatch):
    """An agent makes a key where there is none, and that must not win over one that was there."""
    brought = []
    real = credentials.choose

    def choose(offers):
        brought.append(list(offers))
        return real(brought[-1])

    monkeypatch.setattr(credentials, "choose", choose)
    for _ in range(2):
        open_session(here.url).close()
    (first, known), (second, known_now) = (offers[0] for offers in brought)
    assert (known, known_now) == (False, True)
    assert first == second == credentials.read(str(here.runtime / "keys"), RUN)
