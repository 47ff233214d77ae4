"""Ranks over a store of c10d: rounds, time-outs, and what dead processes have left in it."""

import threading
import time

import pytest
import torch.distributed as dist

from adacheck_store.format.errors import GroupError
from adacheck_store.group import SOLO
from adacheck_store.trainer_hooks import ranks
from adacheck_store.trainer_hooks.grid import Grid
from adacheck_store.trainer_hooks.ranks import StoreGroup, find_group


def on_ranks(store, size, work, *, absent=(), **limits):
    """Do work on every rank that is there; gives each one's result or what it raised."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = work(StoreGroup(store, rank, size, **{"timeout_s": 20.0, **limits}))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for rank, thread in enumerate(threads):
        if rank not in absent:
            thread.start()
    for rank, thread in enumerate(threads):
        if rank not in absent:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    """A store of each kind."""
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def talk(group, word):
    """Some rounds of both kinds; what was heard."""
    heard = []
    for number in range(4):
        heard.append(tuple(group.gather(f"{word}{number}.{group.rank}".encode())))
        mine = f"{word}!{number}".encode() if group.rank == 0 else None
        heard.append(group.broadcast(mine))
    return heard


def test_every_rank_hears_the_same(store):
    """In the order of ranks, round after round."""
    found = on_ranks(store, 3, lambda group: talk(group, "a"))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == (b"a0.0", b"a0.1", b"a0.2")
    assert found[0][1] == b"a!0"


def test_what_dead_processes_have_said_is_not_heard(store):
    """The same store, prefix and rounds, as after a restart by torchrun."""
    for word in ("old", "new", "newer"):
        found = on_ranks(store, 3, lambda group, word=word: talk(group, word))
        assert found[0] == found[1] == found[2]
        assert found[0][0] == tuple(f"{word}0.{rank}".encode() for rank in range(3))


def test_what_was_heard_by_all_is_deleted():
    """The store does not grow with the rounds."""
    store = dist.HashStore()
    counts = []

    def work(group):
        for _ in range(30):
            group.gather(b"x" * 100)
            if group.rank == 0:
                counts.append(store.num_keys())
        return

    assert on_ranks(store, 2, work) == [None, None]
    assert max(counts[10:]) <= counts[2] + 2


@pytest.mark.parametrize(
    ("absent", "said"),
    [([1], "rank 1 of 3 did not come in 1 s"), ([0], "rank 0 of 3 did not come in 1 s"),
     ([1, 2], "ranks 1, 2 of 3 did not come in 1 s")],
)  # fmt: skip
def test_who_does_not_come_is_named_by_all(store, absent, said):
    """From the first word on; and a group that has failed once fails at once."""

    def work(group):
        with pytest.raises(GroupError) as first:
            group.gather(b"x")
        with pytest.raises(GroupError) as second:
            group.gather(b"x")
        assert first.value is second.value
        return first.value.message

    found = on_ranks(store, 3, work, absent=absent, timeout_s=1.0)
    assert [found[rank] for rank in range(3) if rank not in absent] == [said] * (3 - len(absent))


@pytest.mark.parametrize("absent", [0, 1])
def test_who_never_attaches_is_said_soon_and_not_waited_for_long(
    store, absent, monkeypatch, caplog
):
    """A rank that dies before it attaches gives no sign; a round later on may take longer."""
    monkeypatch.setattr(ranks, "SAY_S", 0.2)

    def work(group):
        with pytest.raises(GroupError) as raised:
            group.gather(b"x")
        return raised.value.message

    began = time.monotonic()
    found = on_ranks(store, 3, work, absent=[absent], timeout_s=600.0, meet_s=0.6)
    assert time.monotonic() - began < 30.0
    there = [rank for rank in range(3) if rank != absent]
    assert [found[rank] for rank in there] == [f"rank {absent} of 3 did not come in 0.6 s"] * 2
    said = f"rank {absent} of 3: not attached yet; waiting 0.6 s in all"
    assert [record.message for record in caplog.records] == [said] * 2
    slow = on_ranks(dist.HashStore(), 2, late_second_round, timeout_s=20.0, meet_s=0.6)
    assert slow == [[b"0", b"1"]] * 2


def late_second_round(group):
    """Two rounds, the second of which takes longer than the ranks may to attach."""
    group.gather(b"x")
    if group.rank == 1:
        time.sleep(1.0)
    return list(group.gather(str(group.rank).encode()))


def test_who_leaves_in_between_is_named(store):
    """Within the time that this round may take."""

    def work(group):
        group.gather(b"x")
        if group.rank == 1:
            return
        with pytest.raises(GroupError, match=r"rank 1 of 2 did not come in 0\.3 s"):
            group.gather(b"y", timeout_s=0.3)
        return

    assert on_ranks(store, 2, work) == [None, None]


def test_a_rank_that_has_died_is_not_waited_for(store):
    """One that is at it for long is, however long it takes."""
    died = threading.Event()

    def work(group):
        group.gather(b"x")
        if group.rank == 1:
            time.sleep(2.0)
        group.gather(b"y")
        if group.rank == 1:
            group._life = None  # as if its process had been killed
            died.set()
            return
        assert died.wait(20)
        with pytest.raises(GroupError, match=r"rank 1 of 2 gave no sign of life for 1 s"):
            group.gather(b"z")
        return

    before = time.monotonic()
    assert on_ranks(store, 2, work, timeout_s=60.0, silent_s=1.0) == [None, None]
    assert time.monotonic() - before < 30


def test_what_fails_in_a_room_stays_there(store):
    """Who comes late hears that the others have left, at once; in the next room all meet."""

    def work(group):
        heard = [group.gather(b"here")]
        began = time.monotonic()
        room = group.room("look/4")
        if group.rank == 1:
            time.sleep(1.5)
        try:
            for _ in range(2):
                room.exchange([b"one"] * 3, 0.5 if group.rank != 1 else 20.0)
        except GroupError as error:
            heard.append(error.message)
        waited_s = time.monotonic() - began
        room = group.room("look/8")
        heard.append(room.exchange([f"{group.rank}".encode()] * 3, 20.0))
        heard.append(group.gather(b"still here"))
        return heard, waited_s

    found = on_ranks(store, 3, work)
    assert [heard[1] for heard, _ in found] == [
        "rank 1 of 3 did not come in 0.5 s", "ranks 0, 2 of 3 waited no longer",
        "rank 1 of 3 did not come in 0.5 s",
    ]  # fmt: skip
    assert found[1][1] < 10
    for heard, _ in found:
        assert heard[2:] == [[b"0", b"1", b"2"], [b"still here"] * 3]


MANY = 18
"""Ranks that form a grid, of three columns."""


def words(group, number):
    """What a rank sends to each in a round, and what it is to hear; some of it is nothing."""
    ranks = range(group.size)
    sent, heard = (
        [f"{number}:{a}>{b}".encode() * (b % 3) for a, b in pairs]
        for pairs in ([(group.rank, b) for b in ranks], [(a, group.rank) for a in ranks])
    )
    return sent, heard


def some_rounds(group, timeout_s):
    """Enough of them for whoever has left to be missed by all."""
    for number in range(3):
        group.exchange(words(group, number)[0], timeout_s)


def test_many_ranks_speak_to_few_and_hear_all():
    """In two hops; in any order with rounds of all; what was read is deleted."""
    store, sizes = dist.HashStore(), []

    def work(group):
        assert len(group._grid.peers) == 3 + MANY // 3 - 1
        for number in range(8):
            sent, expected = words(group, number)
            assert group.exchange(sent, 20.0) == expected
            if number % 3 == 1:
                told = group.gather(str(number).encode())
                assert list(told) == [str(number).encode()] * MANY
            if group.rank == 0:
                sizes.append(store.num_keys())
        return

    assert on_ranks(store, MANY, work) == [None] * MANY
    assert max(sizes) < 3 * MANY * (3 + MANY // 3) < MANY * MANY * 2


def test_one_of_many_that_comes_late_holds_nobody_up_twice():
    """All fail in time, though few have waited for it; it hears at once that they have left."""

    def work(group):
        group.gather(b"here")
        room = group.room("look/4")
        if group.rank == 7:
            time.sleep(2.5)
        began = time.monotonic()
        with pytest.raises(GroupError) as raised:
            some_rounds(room, 1.0 if group.rank != 7 else 30.0)
        took_s = time.monotonic() - began
        sent, expected = words(group, 9)
        assert group.room("look/8").exchange(sent, 30.0) == expected
        return raised.value.message, took_s

    found = on_ranks(dist.HashStore(), MANY, work)
    late = "rank 7 of 18 did not come in"
    assert all(late in said or "waited no longer" in said for said, _ in found)
    assert sum(late in said for said, _ in found) >= len(Grid(7, MANY).row) - 1
    assert found[7][1] < 15
    assert max(took_s for _, took_s in found) < 15


def test_all_of_many_know_who_has_died():
    """Those that wait for it tell the others."""

    def work(group):
        group.gather(b"here")
        room = group.room("look/4")
        if group.rank == 7:
            group._life = room._life = None  # as if its process had been killed
            return set()
        with pytest.raises(GroupError, match=r"gave no sign of life for 1 s|waited no longer"):
            some_rounds(room, 30.0)
        return set(group.lost)

    found = on_ranks(dist.HashStore(), MANY, work, silent_s=1.0)
    assert found == [set() if rank == 7 else {7} for rank in range(MANY)]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 36, 96, 100])
def test_the_grid_of_so_many_ranks(size):
    """Everybody is in one row and one column, and these have one rank in common."""
    grids = [Grid(rank, size) for rank in range(size)]
    for rank, grid in enumerate(grids):
        assert all(list(grids[peer].row) == list(grid.row) for peer in grid.row)
        assert all(list(grids[peer].column) == list(grid.column) for peer in grid.column)
        assert set(grid.row) & set(grid.column) == {rank}
        assert len(grid.row) * len(grid.column) == size
    assert len(grids[0].row) == {16: 4, 36: 6, 96: 8, 100: 10}.get(size, 1)


def test_what_no_grid_has_sent_is_refused():
    """Another version's ranks, say."""
    for wrong in (b"", b"left", bytes(15), bytes(8) + b"x"):
        with pytest.raises(GroupError, match="another rank says"):
            Grid(0, 2).exchange([b"", b"x"], lambda some, times, wrong=wrong: [
                wrong if peer else said for peer, said in some.items()
            ])  # fmt: skip


def test_a_process_alone_is_no_group():
    """Nothing is asked of torch.distributed where it is not initialised."""
    assert find_group() is SOLO
