"""The vigil: ranks whose digests differ agree where to look, and nobody waits for ever."""

import threading
import time

import pytest
import torch.distributed as dist

from adacheck_store.trainer_hooks import vigil
from adacheck_store.trainer_hooks.ranks import StoreGroup
from adacheck_store.trainer_hooks.vigil import Vigil

BOTH = "0.1.2"
LONGEST = 20


class Told:
    """A rank's digests of the last steps, as a test wants them."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, str]] = {}

    def say(self, step: int, digest: str) -> None:
        """Of a step; empty: not known."""
        self.steps = {**self.steps, step: {BOTH: digest}}

    def lately(self) -> dict[int, dict[str, str]]:
        """As `Witnessing.lately`."""
        return dict(self.steps)


def groups_of(size: int) -> list[StoreGroup]:
    """Ranks that have met."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [StoreGroup(server, rank, size) for rank in range(size)]
    meet = [threading.Thread(target=group.gather, args=(b"",)) for group in groups]
    for thread in meet:
        thread.start()
    for thread in meet:
        thread.join()
    return groups


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks in this process, each with its vigil and what it tells."""
    monkeypatch.setattr(vigil, "POLL_S", 0.01)
    found = [(Vigil(group, 10.0, LONGEST), Told()) for group in groups_of(2)]
    for each, told in found:
        each.watch(2, told)
        each.begin()
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
        ranks[0][1].say(step, f"x{step}")
        ranks[1][1].say(step + 1, f"x{step + 1}")
    assert both(ranks, 3, 25) == [-1, -1]


@pytest.mark.parametrize("how", ["another digest", "does not know", "failed"])
def test_all_ranks_look_at_one_boundary(ranks, how):
    """After the last of those that any may have closed by itself."""
    ranks[0][1].say(3, "x")
    ranks[1][1].say(3, {"another digest": "z", "does not know": "", "failed": "x"}[how])
    if how == "failed":
        ranks[1][0].ask(2)
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
    ranks[0][1].say(3, "x")
    ranks[1][1].say(3, "z")
    one, two = both(ranks, 4, 20000, 0.001, 0.1)
    assert one == two > 5


def test_what_was_equal_before_the_last_look_is_not_asked_again(ranks):
    """A step up to which all were found equal meanwhile."""
    for each, told in ranks:
        each.watch(5, told)
    for _, told in ranks:
        told.say(5, "x")
    ranks[1][1].say(4, "z")
    assert both(ranks, 6, 25) == [-1, -1]


def test_a_rank_that_has_ended_is_not_waited_for(ranks):
    """Its last words say where it is; the other looks in vain at worst."""
    ranks[1][0].reached(9)
    ranks[1][0].end()
    while ranks[1][0]._thread.is_alive():
        time.sleep(0.01)
    ranks[0][1].say(9, "x")
    ranks[1][1].say(9, "z")
    board = ranks[0][0]._group.board()
    board.post("witness/1", ranks[1][0]._told())
    began = time.monotonic()
    assert go_on(ranks[0], 9, 2000) > 9
    assert time.monotonic() - began < 8


def test_a_rank_that_shares_nothing_makes_nobody_blind(monkeypatch):
    """What the two others have of each other is compared all the same."""
    monkeypatch.setattr(vigil, "POLL_S", 0.01)
    found = [(Vigil(group, 10.0, LONGEST), Told()) for group in groups_of(3)]
    for rank, (each, told) in enumerate(found):
        each.watch(2, told if rank else None)
        each.begin()
    found[1][1].say(3, "x")
    found[2][1].say(3, "z")
    pairs = [found[1], found[2]]
    threading.Thread(target=go_on, args=(found[0], 4, 2000), daemon=True).start()
    one, two = both(pairs, 4, 2000)
    for each, _ in found:
        each.end()
    assert one == two > 5


def test_a_board_that_cannot_be_reached_is_tried_again(ranks, monkeypatch):
    """Nobody waits for what was not agreed on; what is wrong is found once it is there again."""
    slow, _ = ranks[1]
    failed = []
    round_ = slow._round

    def fails(board) -> None:
        if len(failed) < 3:
            failed.append(1)
            raise RuntimeError("the store does not answer")
        round_(board)

    monkeypatch.setattr(slow, "_round", fails)
    ranks[0][1].say(3, "x")
    ranks[1][1].say(3, "z")
    one, two = both(ranks, 4, 2000)
    assert one == two > 5
    assert len(failed) == 3


def test_looks_that_help_nothing_are_asked_for_ever_more_seldom(ranks):
    """And soon again after a long calm."""
    ranks[0][1].say(3, "x")
    ranks[1][1].say(3, "z")
    one, two = both(ranks, 4, 2000)
    rests = []
    for each, _ in ranks:
        each.reached(one + 1)
        rests.append(each._quiet - one - 1)
    first = ranks[0][0]
    first._rested()
    first._rested()
    assert first._quiet == first._step + LONGEST
    first._step += 10 * LONGEST
    first._rested()
    assert one == two
    assert rests == [vigil.REST] * 2
    assert first._rest == vigil.REST


@pytest.mark.parametrize("how", ["another digest", "does not know", "failed"])
def test_a_rest_is_no_longer_than_from_base_to_base(ranks, how):
    """However often a look has helped nothing: what is stored meanwhile may not be restored."""
    for each, told in ranks:
        each.watch(2, told)
        if how == "failed":
            each.ask(2)
        for _ in range(9):
            each._rested()
    ranks[0][1].say(3, "x")
    ranks[1][1].say(3, {"another digest": "z", "does not know": "", "failed": "x"}[how])
    assert {each._quiet for each, _ in ranks} == {LONGEST - 1}
    one, two = both(ranks, 4, 400)
    assert one == two >= LONGEST
