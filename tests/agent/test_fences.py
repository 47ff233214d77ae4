"""An agent that prunes while its run goes on elsewhere, and nobody tells it: the log does."""

import re
from pathlib import Path

import pytest

from adacheck_store.format.manifest import Floor
from adacheck_store.terms import CLAIM_S, claim_term, read_log
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from tests.agent.kit import Node, Trainer
from tests.agent.trainer import RUN, open_session
from tests.core.kit import Journal, begin, make_toy, train
from tests.waits import until

pytestmark = pytest.mark.fault


def claimed(here: Node, other: Node) -> None:
    """Somebody has claimed a newer term, and is restoring."""
    far = ZarrTier(LocalObjects(other.store / "objects"))
    claim_term(far, RUN)
    far.close()


def leased(here: Node, other: Node) -> None:
    """A planner has asked this agent to keep everything; of its claim nothing is to be seen."""
    here.ask("ask", term="t000002-" + "0" * 16)


def begun(here: Node, other: Node) -> None:
    """A trainer on another node, whose agent this one does not know, has begun a newer term."""
    assert Trainer(other, 0).ready > 0


NEWER = {
    "claimed": (claimed, CLAIM_S, "refused"),
    "leased": (leased, CLAIM_S, "refused"),
    # As it is after ten minutes in which the new term's trainer had no more to say of its claim.
    "begun": (begun, -1.0, "TermError: term t000002.*has taken over this run"),
}


@pytest.mark.parametrize("how", NEWER)
def test_a_floor_that_was_chosen_before(nodes, here: Node, tmp_path: Path, how: str) -> None:
    """No floor is written, nothing goes. In the far tier `put_floor` sees it too, in that log."""
    act, claim_s, expected = NEWER[how]
    here.agent(module=("tests.agent.held", str(tmp_path), str(claim_s)))
    session, toy = open_session(here.url), make_toy()
    begin(session, toy, Journal())

    def chosen() -> bool:
        train(session, toy, Journal(), 4)
        session.flush(60.0)
        return (tmp_path / "chosen").exists()

    until(chosen, "a floor is chosen")
    act(here, nodes("c"))
    (tmp_path / "go").touch()
    came = tmp_path / "came"
    until(lambda: came.exists() and came.read_text(), "it went on")
    assert re.match(expected, came.read_text())
    assert here.status()["floors"]["lmdb"] < int((tmp_path / "chosen").read_text())
    session.close()
    here.kill()
    tier = LmdbTier(here.store / "lmdb" / f"{here.name}.{RUN}", readonly=True)
    floors = [entry.step for entry in read_log(tier, RUN) if isinstance(entry, Floor)]
    tier.close()
    assert max(floors, default=-1) < int((tmp_path / "chosen").read_text())
