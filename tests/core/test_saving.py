"""Saves from outside: where they leave the history, and that nothing counts of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import adacheck_store as ada
from adacheck_store.catalog import Trouble, read_catalog
from adacheck_store.foreign import Foreign, lay_out, whole
from adacheck_store.format.errors import (
    MalformedError,
    RestoreError,
    TermError,
    TierFullError,
    TierUnavailableError,
)
from adacheck_store.group import SOLO
from adacheck_store.location import locate
from adacheck_store.recovery import plan_restore
from adacheck_store.saving import Saved, save
from adacheck_store.store import Store, open_for_saving
from adacheck_store.terms import claim_term, read_log
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.wrappers import WrapperTier
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.trainer_hooks.extras import extra_record
from tests.core.kit import KeptTier
from tests.core.ranks import on_ranks

RUN = "run"


def store_on(tier: Tier) -> Store:
    """A store of one tier."""
    return Store("memory://given", tier, tier)


def put(store: Store, step: int, act: Callable[[], object] = lambda: None, group=SOLO) -> Saved:
    """Save a small state; ``act`` is done while its blocks are written."""
    tensor = torch.full((5,), float(step))

    def read() -> torch.Tensor:
        act()
        return tensor

    name = f"w{group.rank}"
    laid = lay_out(Foreign(model={name: replace(whole(tensor), read=read)}))
    return save(
        store, RUN, step, group, laid, lambda link: extra_record(link, step, {}), "a test"
    )  # fmt: skip


def newest(tier: Tier) -> int:
    """The newest provable step."""
    return plan_restore(read_catalog([tier], RUN)).step


def heads(tier: Tier) -> set[str]:
    """All that is visible of a run but layouts and the log."""
    return {key for key in tier.list(f"{RUN}/") if "/layout/" not in key and "/log/" not in key}


class OddTier(WrapperTier):
    """Runs ``hook`` with the name and the argument of each call; it may raise."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.hook: Callable[[str, object], None] = lambda what, about: None

    def head(self, key: str):
        """Hand on."""
        self.hook("head", key)
        return self.inner.head(key)

    def sync(self) -> None:
        """Hand on."""
        self.hook("sync", "")
        self.inner.sync()


def test_a_save_goes_on_from_the_newest_step_below() -> None:
    """The usual case: steps stay, each save hangs on the one before."""
    tier = KeptTier()
    first, second = put(store_on(tier), 5), put(store_on(tier), 9)
    assert (first.parent_term, second.parent_term, second.fork_step) == ("", first.term, 5)
    assert newest(tier) == 9


def test_a_newer_claim_refuses_a_save_that_is_being_written() -> None:
    """A job that was started again restores what was there before: nothing of the save counts."""
    tier = KeptTier()
    put(store_on(tier), 5)
    before = heads(tier)
    with pytest.raises(TermError, match="has claimed"):
        put(store_on(tier), 9, lambda: claim_term(tier, RUN))
    assert heads(tier) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_two_saves_that_overlap_the_later_counts(ranks: int) -> None:
    """And it hangs on the history, not beside it; on all ranks the other raises."""
    tier, done = KeptTier(), []
    first = put(store_on(tier), 5)

    def save_other() -> None:
        done.append(put(store_on(tier), 20))

    def rank(group):
        put(store_on(tier), 9, save_other if group.rank == 0 else lambda: None, group)

    assert [type(error) for error in on_ranks(ranks, rank)] == [TermError] * ranks
    assert (done[0].parent_term, done[0].fork_step) == (first.term, 5)
    assert newest(tier) == 20
    assert {key.split("/")[1] for key in heads(tier)} == {first.term, done[0].term}


def test_a_run_that_goes_on_meanwhile_refuses_the_save() -> None:
    """A training that saves a step while a save writes: its later steps would be off the line."""
    url = "memory://goes-on"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ada.attach(model, optimizer, RUN, url) as ckpt:

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            ckpt.end_step()
            ckpt.flush()

        train()
        store = open_for_saving(url)
        with pytest.raises(TermError, match="went on to step 2"):
            put(store, 100, train)
        train()
    assert newest(store.far) == 3


@pytest.mark.parametrize("follows", [True, False])
def test_a_run_taken_over_at_the_end(follows: bool) -> None:
    """By who goes on from this very save: it counts. By who does not: it is said."""
    tier = KeptTier()
    put(store_on(tier), 5)
    odd = OddTier(tier)
    taken = []

    def take_over(what: str, about: object) -> None:
        if what == "sync" and not taken and newest(tier) == 9:
            taken.append(True)
            put(store_on(tier), 20 if follows else 7)

    odd.hook = take_over
    if follows:
        assert put(store_on(odd), 9).step == 9
        assert newest(tier) == 20
    else:
        with pytest.raises(TermError, match="has taken over"):
            put(store_on(odd), 9)
    assert taken


def test_what_cannot_be_read_now_is_not_taken_for_absent() -> None:
    """A base's head that does not answer, a tier that was not opened: refused, nothing claimed."""
    tier = KeptTier()
    put(store_on(tier), 5)
    put(store_on(tier), 7)
    entries = len(read_log(tier, RUN))
    odd = OddTier(tier)

    def busy(what: str, about: object) -> None:
        if what == "head" and "/base/000000000007-" in f"{about}":
            raise TierUnavailableError("503")

    odd.hook = busy
    with pytest.raises(TierUnavailableError, match="503"):
        put(store_on(odd), 9)
    closed = Trouble(tier="lmdb:b", key="", error=TierUnavailableError("closed"))
    with pytest.raises(TierUnavailableError, match="closed"):
        put(replace(store_on(tier), troubles=(closed,)), 9)
    assert len(read_log(tier, RUN)) == entries


def test_no_fresh_root_beside_damage() -> None:
    """Nothing can be proven, for what there is is damaged: it may be mended yet."""
    tier = KeptTier()
    put(store_on(tier), 5)
    odd = OddTier(tier)

    def damaged(what: str, about: object) -> None:
        if what == "head" and "/base/" in f"{about}":
            raise MalformedError("damaged", rule="test")

    odd.hook = damaged
    with pytest.raises(RestoreError, match=r"damaged.*fsck"):
        put(store_on(odd), 9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_that_fails_withdraws_the_step(tmp_path, ranks: int) -> None:
    """After the gate, at the document of a base: no manifest and no rank's records stay."""
    tiers = [ZarrTier(locate((tmp_path / "store").as_uri()).make()) for _ in range(ranks)]
    put(store_on(tiers[0]), 5)
    before = heads(tiers[0])
    last, plain = tiers[-1], tiers[-1]._write_document

    def full(arrival) -> None:
        if arrival.key.kind == "base":
            raise TierFullError("full")
        plain(arrival)

    last._write_document = full

    def rank(group):
        put(store_on(tiers[group.rank]), 9, group=group)

    assert [type(error) for error in on_ranks(ranks, rank)] == [TierFullError] * ranks
    assert heads(tiers[0]) == before
    assert newest(tiers[0]) == 5
