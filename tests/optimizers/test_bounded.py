"""Training in class bounded: captured bases in time, drift measured, and what becomes of it.

Folds here are made to have other kernels than the trainer: it trains fused, they fold plainly.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck_store as ada
from adacheck_store import fold as fold_module
from adacheck_store.catalog import RecordRef, read_catalog
from adacheck_store.compact import ReplayedBase
from adacheck_store.drift import CapturedBases, _Comparing
from adacheck_store.engines import StepEngine
from adacheck_store.fetch import Fetcher
from adacheck_store.format.bodies import BOUNDED_STEPS
from adacheck_store.format.errors import AdaCheckError, NotProvableError, UsageError
from adacheck_store.optimizers import arithmetic_digest
from adacheck_store.reading import open_layout
from adacheck_store.recovery import plan_restore
from adacheck_store.restore import restore_state
from adacheck_store.store import Store, open_store
from adacheck_store.tools.compact import compact
from adacheck_store.trainer_hooks import encode as encode_module
from tests.hooks.helpers import adamw, attach, bits, mlp, new_url, same, train

OPTIONS = {"base_every": 4, "bounded_every": 16, "keep": 3}


def plainly(groups: Any) -> list[dict[str, Any]]:
    """The groups without fused kernels."""
    return [{**group, "fused": False, "foreach": False} for group in groups]


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds in this process are a machine's that has no fused kernels."""
    keywords = StepEngine._keywords
    monkeypatch.setattr(StepEngine, "_keywords", lambda self, g: plainly(keywords(self, g)))

    def folds_alike(name: str, groups: Any, dtypes: Any, digest: str) -> bool:
        return arithmetic_digest(name, plainly(groups), dtypes) == digest

    monkeypatch.setattr(fold_module, "folds_alike", folds_alike)
    monkeypatch.setattr(encode_module, "folds_alike", folds_alike)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A store with both tiers."""
    return (tmp_path / "store").as_uri()


def trained(url: str, steps: int, **options: Any) -> tuple[dict[int, Any], Any]:
    """Train so that folds keep up; what there was at each step, and the status at the end."""
    model = mlp(0)
    optimizer = adamw(model)
    marks = {}
    with attach(model, optimizer, url, **{**OPTIONS, **options}) as ckpt:
        ckpt.restore()
        for number in range(1, steps + 1):
            train(model, optimizer)
            marks[number] = bits(model, optimizer)
            if number % 4 == 0:
                with contextlib.suppress(AdaCheckError if not options.get("strict", True) else ()):
                    ckpt.flush(30)
        return marks, ckpt.status()


def bases(url: str) -> list[RecordRef]:
    """All bases of the store."""
    with open_store(url) as store:
        return bases_of(store)


def bases_of(store: Store) -> list[RecordRef]:
    """All bases of an open store."""
    found = read_catalog(store.tiers, "r").bases.values()
    return sorted((ref for refs in found for ref in refs), key=lambda ref: ref.step)


@pytest.mark.usefixtures("other_kernels")
def test_captured_bases_come_in_time_and_their_drift_is_told(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="adacheck_store")
    marks, status = trained(url, 41, keep=100)
    captured = [ref for ref in bases(url) if ref.origin == "captured"]
    assert [ref.step for ref in captured] == [0, 16, 32]
    assert all(ref.gap is None for ref in captured)
    replayed = {ref.step: ref for ref in bases(url) if ref.origin == "replayed"}
    assert list(replayed) == [4, 8, 12, 20, 24, 28, 36, 40]
    assert {ref.exactness for ref in replayed.values()} == {"bounded"}
    assert all(ref.since == ref.step // 16 * 16 for ref in replayed.values())
    assert status.mismatch == ""
    assert status.last_error == ""
    assert status.drift.steps == 16
    assert 0 < status.drift.absolute < 1e-5
    assert status.drift.ulps
    told = [text for text in caplog.messages if text.startswith("drift of")]
    assert [text.rpartition(" ")[2] for text in told] == ["16", "32"]
    with open_store(url) as store:
        done = restore_state(store.tiers, "r", step=32)
    assert done.certificate.exactness == "exact", "a captured base is what it was"
    assert marks[32]


@pytest.mark.usefixtures("other_kernels")
def test_too_much_drift_quarantines_the_stretch_and_re_bases(url: str) -> None:
    _, status = trained(url, 20, max_drift=1e-12, keep=100, strict=False)
    assert "more than max_drift 1e-12" in status.mismatch
    assert not status.exposed, "the base has come"
    assert status.drift.absolute > 1e-12
    closing = [ref for ref in bases(url) if ref.gap is not None]
    assert len(closing) == 1
    assert closing[0].gap is not None
    assert closing[0].gap["from"] == 1
    with open_store(url) as store:
        for step in (0, 16, closing[0].step):
            exact = restore_state(store.tiers, "r", step=step)
            assert exact.certificate.exactness == "exact"
        for step in (1, 8, 15):
            with pytest.raises(NotProvableError):
                restore_state(store.tiers, "r", step=step)


@pytest.mark.usefixtures("other_kernels")
def test_what_is_to_be_compared_is_not_pruned_before(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one base kept, the fold that leads to a captured base lies below it."""
    compare = CapturedBases.compare

    def slowly(self: Any, fetcher: Any, layout: Any, plan: Any, truth: Any) -> None:
        time.sleep(1.0)  # pruning would have had its time
        near = [dataclasses.replace(ref, tiers=("lmdb",)) for ref in (plan.base, *plan.deltas)]
        compare(self, fetcher, layout,
                dataclasses.replace(plan, base=near[0], deltas=tuple(near[1:])), truth)  # fmt: skip

    monkeypatch.setattr(CapturedBases, "compare", slowly)
    _, status = trained(url, 20, keep=1)
    assert status.drift.steps == 16
    with open_store(url) as store:
        held = read_catalog([store.near], "r")
    assert min(ref.step for refs in held.bases.values() for ref in refs) >= 16, "pruned after it"


@pytest.mark.usefixtures("other_kernels")
def test_a_restored_run_counts_from_what_it_began_with(url: str) -> None:
    trained(url, 10)
    model = mlp(1)
    optimizer = adamw(model)
    with attach(model, optimizer, url, **OPTIONS) as ckpt:
        report = ckpt.restore()
        assert report.certificate.exactness == "bounded"
        for _ in range(17):
            train(model, optimizer)
        ckpt.flush(30)
        there = ckpt.status()
    assert [ref.step for ref in bases(url) if ref.origin == "captured"][-1] == 26
    assert there.drift.steps == 16
    with open_store(url) as store:
        assert restore_state(store.tiers, "r").step == 27


def test_where_folds_are_exact_no_captured_base_comes_and_nothing_drifts(url: str) -> None:
    marks, status = trained(url, 20)
    assert [ref.step for ref in bases(url) if ref.origin == "captured"] in ([], [0])
    assert status.drift is None
    again = mlp(1)
    optimizer = adamw(again)
    with attach(again, optimizer, url, **OPTIONS) as ckpt:
        ckpt.restore()
        same(bits(again, optimizer), marks[20])


@pytest.mark.usefixtures("other_kernels")
def test_a_replayed_base_serves_no_longer_than_256_steps() -> None:
    """Neither made nor gone on from: in the planner, and in whoever folds."""
    url = new_url()
    model = mlp(0)
    optimizer = adamw(model)
    with attach(model, optimizer, url, base_every=200, keep=100) as ckpt:
        ckpt.restore()
        for _ in range(250):
            train(model, optimizer)
        ckpt.flush(60)
        assert ckpt.status().base == 200
    with open_store(url) as store:
        catalog = read_catalog(store.tiers, "r")
        plan = plan_restore(catalog)
        assert (plan.step, plan.parts[0].base.step) == (250, 200)
        short = shifted(catalog, 50)
        assert plan_restore(short).step == 256 - 50
        with pytest.raises(NotProvableError, match="still serves"):
            plan_restore(short, 256 - 49)
        part = plan.parts[0]
        layout = open_layout(store.tiers, "r", part.layout)
        place = {"run": "r", "term": plan.term, "manifest": plan.manifest_id}
        base = ReplayedBase(Fetcher(store.tiers), layout, part, step=250, **place)
        for _ in base.blocks():
            pass
        assert base.seal().head.body["since"] == 0
        worn = dataclasses.replace(part, base=dataclasses.replace(part.base, since=-7))
        with pytest.raises(NotProvableError, match="step -7 is the last that is exact"):
            ReplayedBase(Fetcher(store.tiers), layout, worn, step=250, **place)


def shifted(catalog: Any, steps: int) -> Any:
    """The catalog as if its bounded bases went back to an exact one so many steps before."""
    moved = {
        place: tuple(
            dataclasses.replace(ref, since=ref.since - steps) if ref.exactness == "bounded" else ref
            for ref in refs
        )
        for place, refs in catalog.bases.items()
    }
    return dataclasses.replace(catalog, bases=moved)


@pytest.mark.usefixtures("other_kernels")
def test_no_base_is_folded_on_when_captured_ones_fail_to_come(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upkeep asks for one itself, and what lies beyond is not offered."""
    for module in ("compact", "upkeep"):
        monkeypatch.setattr(f"adacheck_store.{module}.BOUNDED_STEPS", 16)
    _, status = trained(url, 26, keep=100, bounded_every=256, strict=False)
    assert "the last that is exact" in status.mismatch
    closing = [ref for ref in bases(url) if ref.gap is not None]
    assert len(closing) == 1
    assert (
        max(ref.step for ref in bases(url) if ref.exactness == "bounded" and ref.since == 0) == 16
    )
    assert 20 <= closing[0].step <= 24


@pytest.mark.parametrize("bad", [
    {"bounded_every": 257}, {"bounded_every": 0}, {"bounded_every": 2.0}, {"max_drift": -1.0},
    {"max_drift": float("nan")}, {"max_drift": "1e-3"},
])  # fmt: skip
def test_what_cannot_be_is_refused(url: str, bad: dict[str, Any]) -> None:
    model = mlp(0)
    with pytest.raises(UsageError, match=next(iter(bad))):
        ada.attach(model, adamw(model), run="r", store=url, **bad)
    assert BOUNDED_STEPS == 256


def test_equal_infinities_are_no_drift() -> None:
    found = _Comparing(None)  # type: ignore[arg-type]
    odd = torch.tensor([float("inf"), float("nan"), 1.0])
    other = odd.clone()
    other[2] = 1.5
    found._compare(odd, other)
    assert found.absolute == 0.5


@pytest.mark.usefixtures("other_kernels")
def test_the_command_compact_puts_nothing_inexact_before_an_exact_chain(url: str) -> None:
    """A restore prefers a base to the chain that leads to it."""
    trained(url, 3, keep=100)  # no base of the trainer's own after the first
    before = bases(url)
    with open_store(url, write=True) as store:
        with pytest.raises(UsageError, match="another arithmetic") as told:
            list(compact(store, "r"))
        assert told.value.place["step"] == 3
        assert "--inexact" in told.value.hint
        assert bases_of(store) == before
        assert [row.exactness for row in compact(store, "r", inexact=True)] == ["bounded"]
