"""The run's log while several write it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from adacheck_store.format.keys import log_key
from adacheck_store.store import open_store
from adacheck_store.terms import claim_term, read_log
from adacheck_store.tiers.zarr import ZarrTier


@pytest.mark.parametrize("aside", [False, True])
def test_who_takes_an_entry_back_takes_back_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    """Its index is another's as soon as the document is gone, while the rest is still to go."""
    with open_store(f"file://{tmp_path}/store", write=True) as store:
        far, key = store.far, str(log_key("run", 1))
        assert isinstance(far, ZarrTier)
        claim_term(far, "run")
        delete, claimed = far.objects.delete, []

        def then_another_claims(names: Iterable[str]) -> None:
            delete(names)
            if not claimed and not list(far.objects.list(f"{key}/")):
                claimed.append("")  # no claim within the claim
                claimed[0] = str(claim_term(far, "run"))

        monkeypatch.setattr(far.objects, "delete", then_another_claims)
        if aside:
            far.set_aside(key)
        else:
            far.delete([key])
        assert [entry.term for entry in read_log(far, "run")] == claimed
