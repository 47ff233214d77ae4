"""The vigil: ranks whose digests differ agree where to look, and nobody waits for ever."""

import threading
import time

import pytest
import torch.distributed as dist

from adacheck_store.redundancy.witness import DIGEST_BYTES, Witness
from adacheck_store.trainer_hooks import vigil
from adacheck_store.trainer_hooks.ranks import StoreGroup
from adacheck_store.trainer_hooks.vigil import Vigil

SETS = {("p000000", "", "a"): "0.1.2", ("p000000", "", "b"): "0.1.2"}


class Told:
    """A rank's digests of the last steps, as a test wants them."""

    def __init__(self) -> None:
        self.steps: dict[int, Witness] = {}

    def say(self, step: int, *digests: bytes, since: int = 2) -> None:
        """Of a step."""
        data = b"".join(digest.ljust(DIGEST_BYTES) for digest in digests)
        self.steps = {**self.steps, step: Witness(since=since, digests=data)}

    def lately(self) -> dict[int, Witness]:
        """As `Witnessing.lately`."""
        return dict(self.steps)


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks in this process, each with its vigil and what it tells."""
    monkeypatch.setattr(vigil, "POLL_S", 0.01)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [StoreGroup(server, rank, 2) for rank in (0, 1)]
    meet = threading.Thread(target=lambda: groups[1].gather(b""))
    meet.start()
    groups[0].gather(b"")
    meet.join()
    found = [(Vigil(group, 10.0), Told()) for group in groups]
    for each, told in found:
        each.begin(2, SETS, told)
    yield found
    for each, _ in found:
        each.end()


def go_on(pair, first: int, last: int, pause_s: float = 0.02) -> int:
    """Close boundaries until the vigil asks for one; that one, -1 if it does not."""
    each, _ = pair
    for step in range(first, last):
        each.reached(step)
        if each.due(step):
            return step
        time.sleep(pause_s)
    return -1


def both(ranks, first: int, last: int, *pauses: float) -> list[int]:
    """The boundaries that the vigils of both ranks ask for."""
    found = [-1, -1]

    def run(rank: int) -> None:
        found[rank] = go_on(ranks[rank], first, last, *pauses[rank : rank + 1])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_equal_digests_call_for_nothing(ranks):
    """Of many steps, and where one rank is ahead of the other."""
    for step in range(3, 9):
        ranks[0][1].say(step, b"x%d" % step, b"y")
        ranks[1][1].say(step + 1, b"x%d" % (step + 1), b"y")
    assert both(ranks, 3, 25) == [-1, -1]


@pytest.mark.parametrize("how", ["another digest", "does not know", "another look"])
def test_all_ranks_look_at_one_boundary(ranks, how):
    """After the last of those that any may have closed by itself."""
    other = {"another digest": (b"z", 2), "does not know": (b"y", -1), "another look": (b"y", 1)}
    digest, since = other[how]
    ranks[0][1].say(3, b"x", b"y")
    ranks[1][1].say(3, b"x", digest, since=since)
    one, two = both(ranks, 4, 2000)
    assert one == two > 5
    for each, _ in ranks:
        each.reached(one + 1)
        assert not each.due(one)


def test_nobody_goes_past_what_is_being_agreed_on(ranks, monkeypatch):
    """One rank is slow, and slow to answer: the other waits at a boundary, not for ever."""
    slow, _ = ranks[1]
    agree = slow._agree

    def later(board) -> None:
        time.sleep(0.5)
        agree(board)

    monkeypatch.setattr(slow, "_agree", later)
    ranks[0][1].say(3, b"x", b"y")
    ranks[1][1].say(3, b"x", b"z")
    one, two = both(ranks, 4, 20000, 0.001, 0.1)
    assert one == two > 5


def test_what_was_equal_before_the_last_look_is_not_asked_again(ranks):
    """A step up to which all were found equal meanwhile."""
    for _, told in ranks:
        told.say(5, b"x", b"y")
    ranks[1][1].say(4, b"x", b"z")
    for each, told in ranks:
        each.begin(5, SETS, told)
    assert both(ranks, 6, 25) == [-1, -1]


def test_a_rank_that_has_ended_is_not_waited_for(ranks):
    """Its last words say where it is; the other looks in vain at worst."""
    ranks[1][0].reached(9)
    ranks[1][0].end()
    while ranks[1][0]._thread.is_alive():
        time.sleep(0.01)
    ranks[0][1].say(9, b"x", b"y")
    ranks[1][1].say(9, b"x", b"z")
    ranks[0][0]._board.post("witness/1", ranks[1][0]._told())
    began = time.monotonic()
    assert go_on(ranks[0], 9, 2000) > 9
    assert time.monotonic() - began < 8
