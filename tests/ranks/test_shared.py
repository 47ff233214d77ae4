"""What several ranks have copies of is found, written by one of them, and read by all."""

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.fetch import ArrayReader, Fetcher
from adacheck_store.format.bodies import decode_delta
from adacheck_store.format.dtypes import item_bytes
from adacheck_store.format.errors import NotProvableError
from adacheck_store.placement import Node
from adacheck_store.reading import open_layout
from adacheck_store.redundancy.assign import Topology
from adacheck_store.redundancy.costs import exchange_bytes
from adacheck_store.redundancy.listing import summary
from adacheck_store.redundancy.shares import shares
from adacheck_store.redundancy.sighting import Piece
from adacheck_store.redundancy.states import Holding, Side, states
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from adacheck_store.tools.fsck import fsck
from tests.ranks.test_kill import drained
from tests.ranks.worker import (
    APART_AT,
    BASE_EVERY,
    EDITED_AT,
    FLIPPED,
    FLIPPED_AT,
    STEPS,
    Launcher,
    build,
    check_against,
)
from tests.waits import until

pytestmark = pytest.mark.fault

FOUND_AT = 2
"""Ranks look after the first and the second update, and share from there on."""

KEPT = {rank: {"keep": 100} for rank in range(2)}
"""Nothing is pruned."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """DDP on two ranks with a BatchNorm, whose statistics are each rank's own, and its end."""
    launcher = Launcher(tmp_path_factory.mktemp("shared"), "ddp", 2)
    return launcher, launcher.reference()


def count_exchanges(rank: int) -> list[int]:
    """The bytes of each all-to-all of this rank, from here on."""
    from adacheck_store.trainer_hooks.ranks import StoreGroup

    sent: list[int] = []
    exchange = StoreGroup.exchange

    def counted(self, messages, timeout_s):
        sent.append(sum(map(len, messages)))
        return exchange(self, messages, timeout_s)

    StoreGroup.exchange = counted
    return sent


def kept(store: Path, step: int) -> dict[str, dict[str, int]]:
    """Of every part the tensors that a step's delta has, and their bytes, padding apart."""
    found = {}
    with open_store(store.as_uri()) as opened:
        catalog = read_catalog(opened.tiers, "e2e")
        for (_, part), refs in catalog.deltas.items():
            ref = next((ref for ref in refs if ref.step == step), None)
            if ref is None:
                continue
            layout = open_layout(opened.tiers, "e2e", ref.layout)
            body = decode_delta(ArrayReader(Fetcher(opened.tiers), ref).head)
            sizes = {}
            for grad in (grad for update in body.updates for grad in update.grads):
                piece = layout.section(grad.section).slices[grad.slice]
                whole = item_bytes(layout.section(grad.section).roles[0][1])
                sizes[piece.name] = piece.elements * (whole if grad.encoding == "raw" else 2)
            for item in body.sets:
                section = layout.section(item.section)
                piece = section.slices[item.slice]
                sizes[piece.name] = piece.elements * item_bytes(section.dtypes[item.role])
            found[part] = sizes
    return found


def predicted(ranks: int) -> int:
    """Bytes of a step of DDP by the pure rules: all has copies but a BatchNorm's statistics."""
    model = build("plain", 0, 1)[0]
    everyone = frozenset(range(ranks))
    held = {rank: [] for rank in everyone}
    for rank in everyone:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            own = "running" in name
            piece = Piece((tuple((0, size) for size in tensor.shape),))
            nbytes = tensor.numel() * tensor.element_size()
            copies = frozenset((rank,)) if own else everyone
            param = Side(piece=piece, copies=copies, nbytes=nbytes)
            trained = isinstance(tensor, type(next(model.parameters())))
            optimizer = Side(piece=piece, copies=everyone, nbytes=2 * nbytes) if trained else None
            shape = tuple(tensor.shape)
            held[rank].append(
                Holding(scope="", name=name, shape=shape, param=param, optimizer=optimizer)
            )
    where = Topology(nodes=[Node(name="n")], ranks=dict.fromkeys(everyone, "n"))
    return sum(part.step_bytes(gradient_bytes=4) for part in shares(states(held), where).parts)


def manifests(store: Path) -> list:
    """The manifests of a run, oldest first."""
    with open_store(store.as_uri()) as opened:
        found = read_catalog(opened.tiers, "e2e").manifests.values()
    return sorted(found, key=lambda manifest: (manifest.term, manifest.step))


def revisions(store: Path, *, damaged: int = 0) -> list:
    """The manifests of a run, oldest first; so many stretches of it cannot be proven."""
    with open_store(store.as_uri()) as opened:
        damage = [item for item in fsck(opened, "e2e") if getattr(item, "severity", "") == "damage"]
    assert len(damage) == damaged, damage
    return manifests(store)


def test_what_all_ranks_have_is_written_once(tmp_path, trained):
    """Training is the same; each step has each gradient once, and of statistics every rank's."""
    launcher, reference = trained
    store = tmp_path / "store"
    attempt = launcher.start(store, before_attach=count_exchanges, given=KEPT)
    assert attempt.wait() == [0, 0]
    check_against(reference, attempt)
    first, found = revisions(store)
    assert (first.step, first.redundancy) == (0, None)
    assert found.step == found.redundancy.agreed == FOUND_AT
    told = summary(found)
    assert sum(part["states"] for part in told["parts"]) == 9 + 4
    assert told["unproven"] == {}
    assert (
        attempt.every("stored", "redundancy")
        == ["as of step 2, 9 of 13 states have copies on several ranks and are kept once"] * 2
    )
    sizes = kept(store, STEPS)
    both = [set(sizes[part]) for part in ("p000000", "p000001")]
    assert both[0] & both[1] == {"1.running_mean", "1.running_var"}
    assert len(both[0] | both[1]) == 11
    assert sum(sum(part.values()) for part in sizes.values()) == predicted(2)
    assert len(kept(store, FOUND_AT - 1)) == 2
    assert kept(store, FOUND_AT) == {}  # a base of what each writes came in its stead
    # Eight parameters with two moments, a counter and two statistics are offered by each rank.
    calls = [row["exchanged"] for rank in (0, 1) for row in attempt.rows(rank) if "stored" in row]
    payload = sum(sum(call[:4]) for call in calls)
    assert payload == 2 * exchange_bytes(tokens=27, sets=0, runs=0).payload


def test_lost_tiers_and_killed_ranks(tmp_path, trained):
    """Each rank reads what the other has written, from its LMDB, and from zarr alone."""
    launcher, reference = trained
    store = tmp_path / "store"
    first = launcher.start(store, hold=9)
    first.until(9)
    first.kill(1)
    check_against(reference, first)
    second = launcher.start(store, hold=13)
    second.until(13)
    until(
        lambda: all(drained(store, rank=rank, step=BASE_EVERY) for rank in (0, 1)),
        "a base of both is far",
    )
    second.kill(0)
    check_against(reference, second)
    assert min(second.every("restored")) >= 7
    assert second.every("restored", "tiers") == [["lmdb:node-a.r0", "lmdb:node-a.r1"]] * 2
    shutil.rmtree(store / "lmdb")
    third = launcher.start(store)
    assert third.wait() == [0, 0]
    check_against(reference, third)
    assert third.every("restored", "tiers") == [["zarr"]] * 2
    assert third.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert third.every("stored", "mismatch") == ["", ""]
    assert revisions(store)[-1].redundancy is not None


def test_ranks_that_cannot_see_each_others_disks(tmp_path, trained):
    """As on two hosts without agents: what was drained is read there, all of it, by each."""
    launcher, reference = trained
    store = tmp_path / "store"
    apart = {rank: {"cache": str(tmp_path / f"disk-{rank}")} for rank in (0, 1)}
    first = launcher.start(store, given=apart, hold=20)
    first.until(20)
    until(
        lambda: all(drained(store, rank=rank, step=BASE_EVERY) for rank in (0, 1)),
        "the first base of both is far",
    )
    first.kill(1)
    check_against(reference, first)
    second = launcher.start(store, given=apart)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert min(second.every("restored")) >= BASE_EVERY
    assert "zarr" in second.every("restored", "tiers")[1]
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]


def test_off_keeps_all_that_each_rank_has(tmp_path, trained):
    """Nobody looks, and every part is whole."""
    launcher, reference = trained
    store = tmp_path / "store"
    off = {rank: {"redundancy": "off"} for rank in (0, 1)}
    attempt = launcher.start(store, given=off, before_attach=count_exchanges)
    assert attempt.wait() == [0, 0]
    check_against(reference, attempt)
    assert [manifest.redundancy for manifest in revisions(store)] == [None]
    assert attempt.every("stored", "exchanged") == [[], []]
    assert attempt.every("stored", "redundancy") == ["off", "off"]
    sizes = kept(store, STEPS)
    assert sizes["p000000"] == sizes["p000001"]
    after = launcher.start(store, inspect=True)
    assert after.wait() == [0, 0]
    check_against(reference, after)
    assert after.every("restored") == [STEPS, STEPS]


def test_switched_off_again(tmp_path, trained):
    """What was shared is read, and each rank writes all that it has from there on."""
    launcher, reference = trained
    store = tmp_path / "store"
    first = launcher.start(store, given=KEPT, hold=13)
    first.until(13)
    first.kill(1)
    off = {rank: {"redundancy": "off"} for rank in (0, 1)}
    second = launcher.start(store, given=off)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert min(second.every("restored")) >= 13 - 3
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]
    assert second.every("stored", "redundancy") == ["off", "off"]
    sizes = kept(store, STEPS)
    assert sizes["p000000"] == sizes["p000001"]


def die_in_the_exchange(rank: int) -> None:
    """Rank 1 dies when it has looked, and is to tell what it saw."""
    from adacheck_store.trainer_hooks.ranks import StoreGroup

    if rank == 1:
        StoreGroup.exchange = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_while_ranks_compare(tmp_path):
    """The other notices in time, says so, and writes on all that it has; a restart shares."""
    launcher = Launcher(tmp_path, "plain", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, before_attach=die_in_the_exchange, silent_s=1.0)
    assert first.wait()[1] == -signal.SIGKILL
    (told,) = [row for row in first.rows(0) if "stored" in row]
    failed = f"step {FOUND_AT}: copies could not be compared: rank 1 of 2 gave no sign of life"
    assert failed in told["redundancy"], "looked again, without a rank that is dead"
    assert [manifest.redundancy for manifest in revisions(store)] == [None]
    assert (told["stored"], told["error"]) == (STEPS, "")
    assert len(kept(store, STEPS)["p000000"]) == 11
    second = launcher.start(store)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    (step,) = set(second.every("restored"))
    assert step < FOUND_AT
    assert second.every("stored", "error") == ["", ""]
    assert revisions(store)[-1].redundancy is not None


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bit_that_flips_is_named_and_kept(tmp_path, ranks):
    """One rank's weight is no copy any more: which, since when; from then on it is kept apart.

    Of two ranks nobody can tell whose bit it was: then each keeps its own.
    """
    launcher = Launcher(tmp_path, "flip", ranks)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, given={rank: {"keep": 100} for rank in range(ranks)})
    assert first.wait() == [0] * ranks
    check_against(reference, first)
    before, after = revisions(store)[1:]
    assert (before.step, after.step) == (FOUND_AT, FLIPPED_AT + 1)
    assert before.redundancy.agreed == FOUND_AT <= after.redundancy.agreed < FLIPPED_AT
    assert summary(after)["unproven"] == {"differed from its copies at step 8": [FLIPPED]}
    who = "1 differ from most copies" if ranks == 3 else (
        "0, 1 differ from each other, and nobody can tell which is right"
    )  # fmt: skip
    where = f"step {FLIPPED_AT + 1}: {FLIPPED} (param, block 0)"
    named = f"{where}: ranks {who}; equal at step {BASE_EVERY}"
    assert all(named in text for text in first.every("stored", "redundancy"))
    keeping = [
        {part for part, sizes in kept(store, step).items() if FLIPPED in sizes}
        for step in (FLIPPED_AT, STEPS)
    ]
    assert [len(parts) for parts in keeping] == [1, 2]
    assert "p000001" in keeping[1]
    assert ranks == 2 or "p000001" not in keeping[0]
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0] * ranks
    check_against(reference, second)
    assert second.every("restored") == [STEPS] * ranks


def test_copies_that_part_before_the_next_look(tmp_path):
    """Post-local SGD: what was kept of the owner alone is no step of the others, and is said."""
    launcher = Launcher(tmp_path, "local", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    first = launcher.start(store, hold=APART_AT + 2, given=KEPT)
    first.until(APART_AT + 2)
    first.kill(1)
    check_against(reference, first)
    with open_store(store.as_uri()) as opened:
        assert restore_state(opened.tiers, "e2e", step=APART_AT - 1).lost == 0
        with pytest.raises(NotProvableError, match=r"in different ways: .*0\.weight"):
            restore_state(opened.tiers, "e2e", step=APART_AT)
    second = launcher.start(store, given=KEPT)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [APART_AT - 1] * 2
    (reasons, _) = second.every("restored", "reasons")
    assert f"step {APART_AT}: copies have been updated in different ways: " in " ".join(reasons)
    assert "0.weight (rank 0 and rank 1)" in " ".join(reasons)
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]


def write_late(rank: int) -> None:
    """The writer takes the boundary of a look up when the next one has long been closed."""
    from adacheck_store.trainer_hooks.witness import Witnessing

    begin = Witnessing.begin

    def later(self, step, places):
        time.sleep(1.0)
        begin(self, step, places)

    Witnessing.begin = later


def test_moments_that_one_rank_has_edited_are_not_the_owners(tmp_path):
    """Though the edit is older than what the writer makes of the look before it."""
    launcher = Launcher(tmp_path, "edit", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    dies = dict.fromkeys(range(2), EDITED_AT + 1)
    first = launcher.start(store, given=KEPT, before_attach=write_late, poisoned=dies)
    assert first.wait() == [-signal.SIGKILL] * 2
    second = launcher.start(store, given=KEPT)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert second.every("restored") == [FOUND_AT] * 2
    (reasons, _) = second.every("restored", "reasons")
    assert f"step {EDITED_AT}: rank 1 cannot tell" in " ".join(reasons)
    assert second.every("final", "digest") == [known[STEPS][0] for known in reference]


def watch_closely(rank: int) -> None:
    """Ranks look at what the others say fifty times a second."""
    from adacheck_store.trainer_hooks import vigil

    vigil.POLL_S = 0.02


def test_copies_that_part_are_found_between_looks(tmp_path):
    """The ranks look at once, and each keeps its own from there on; that is what is restored."""
    launcher = Launcher(tmp_path, "local", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    given = {rank: {"keep": 100, "base_every": 12} for rank in range(2)}
    first = launcher.start(store, hold=APART_AT, given=given, before_attach=watch_closely)
    for step in range(APART_AT, STEPS - 1):  # the ranks hear of it between two of these
        first.gate.open(step)
        first.until(step)
        with suppress(AssertionError):
            until(lambda: len(manifests(store)) > 2, "what each keeps from there on", 1.0)
            break
    first.gate.open(STEPS - 1)
    first.until(STEPS - 1)
    first.kill(1)
    check_against(reference, first)
    _, before, after = revisions(store)
    assert before.step == FOUND_AT
    assert APART_AT < after.step < STEPS - 1
    told = summary(after)
    ((why, names),) = told["unproven"].items()
    assert "updated otherwise than its copies" in why
    assert {"0.weight", "5.bias"} <= set(names)
    second = launcher.start(store, inspect=True)
    assert second.wait() == [0, 0]
    check_against(reference, second)
    assert min(second.every("restored")) >= after.step


def test_where_nothing_is_on_two_ranks_nothing_changes(tmp_path):
    """FSDP2: the revision says so, no base comes with it, and every chain goes on."""
    launcher = Launcher(tmp_path, "fsdp", 2)
    reference = launcher.reference()
    store = tmp_path / "store"
    attempt = launcher.start(store, given=KEPT)
    assert attempt.wait() == [0, 0]
    check_against(reference, attempt)
    first, found = revisions(store)
    assert [part.layout for part in first.parts] == [part.layout for part in found.parts]
    assert set(kept(store, FOUND_AT)) == {"p000000", "p000001"}
    for text in attempt.every("stored", "redundancy"):
        assert ", 0 of " in text
