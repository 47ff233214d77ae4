"""Errors that pass: they are not taken for damage, and may be tried again."""

import errno
import shutil
from pathlib import Path

import pytest
import torch

import adacheck_store as ada
from adacheck_store.format.errors import NotProvableError, RestoreError, TierUnavailableError
from adacheck_store.tiers import lmdb_check
from adacheck_store.tiers.zarr import ZarrTier


def _attach(store: str, run: str = "run", **options: str) -> tuple:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, ada.attach(model, optimizer, run, store, **options)


def _write(store: str) -> None:
    model, optimizer, ckpt = _attach(store)
    with ckpt:
        ckpt.restore()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def test_a_passing_error_does_not_set_the_lmdb_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor left says nothing of the file."""
    store = (tmp_path / "store").as_uri()
    _write(store)
    before = sorted(path.name for path in (tmp_path / "store" / "lmdb").iterdir())

    def no_descriptor(*args: object, **kwargs: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb_check, "verify", no_descriptor)
        with pytest.raises(TierUnavailableError, match="Too many open files"):
            _attach(store)
    assert sorted(path.name for path in (tmp_path / "store" / "lmdb").iterdir()) == before
    _, _, ckpt = _attach(store)
    with ckpt:
        assert ckpt.restore().step == 3


def test_another_step_may_be_asked_for_after_one_that_is_gone(tmp_path: Path) -> None:
    """A typing error does not use up the only restore()."""
    store = (tmp_path / "store").as_uri()
    _write(store)
    _, _, ckpt = _attach(store)
    with ckpt:
        with pytest.raises(NotProvableError, match="step 99"):
            ckpt.restore(99)
        assert ckpt.restore(2).step == 2


def test_a_run_is_not_begun_anew_while_its_history_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is lost, and the far tier answers once with an error: it is asked again."""
    store = (tmp_path / "store").as_uri()
    _write(store)
    shutil.rmtree(tmp_path / "store" / "lmdb")
    _, _, ckpt = _attach(store)

    def no_answer(self: ZarrTier, prefix: str) -> list[str]:
        if prefix.endswith("/log/"):
            return listing(self, prefix)
        raise TierUnavailableError("no answer", tier="zarr")

    listing = ZarrTier.list
    with ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(ZarrTier, "list", no_answer)
            with pytest.raises(RestoreError, match="no answer"):
                ckpt.restore()
        assert ckpt.restore().step == 3


def test_a_run_is_not_begun_anew_beside_its_damaged_lmdb(tmp_path: Path) -> None:
    """The objects are lost, and the LMDB was set aside: said, unless it is asked for."""
    store = (tmp_path / "store").as_uri()
    _write(store)
    shutil.rmtree(tmp_path / "store" / "objects")
    (data,) = (tmp_path / "store" / "lmdb").glob("*/data.mdb")
    with data.open("r+b") as file:
        file.write(b"\xff" * 4)
    _, _, ckpt = _attach(store)
    with ckpt, pytest.raises(RestoreError, match="set aside as"):
        ckpt.restore()
    _, _, ckpt = _attach(store)  # another start meets no damage, and still knows
    with ckpt, pytest.raises(RestoreError, match="has records of this run"):
        ckpt.restore()
    for run, options in (("other", {}), ("run", {"resume": "never"})):
        _, _, ckpt = _attach(store, run, **options)
        with ckpt:
            assert ckpt.restore().fresh
