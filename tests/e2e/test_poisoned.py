"""A step after which every attempt dies is left behind, and said; nothing else is taken for it."""

import signal

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.store import open_store
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.log import TermRow, log
from tests.e2e.worker import STEPS, Worker, check_against, make_reference

pytestmark = pytest.mark.fault

WIDTH, POISONED = 64, 12


def test_a_step_that_kills_every_attempt(tmp_path):
    """Killed, or out by an assertion, in the same step each time; then cured, and finished."""
    store, reference = (tmp_path / "store").as_uri(), make_reference(tmp_path, WIDTH)
    starts = []

    def attempt(code: int, **options) -> Worker:
        worker = Worker(tmp_path / f"w{len(starts)}", store, **{"width": WIDTH, **options})
        assert worker.wait() == code
        check_against(reference, worker)
        starts.extend(row["restored"] for row in worker.rows() if "restored" in row)
        return worker

    for by in ("SIGKILL", "SIGKILL", "assert", "SIGKILL"):
        attempt(1 if by == "assert" else -signal.SIGKILL, poisoned=POISONED, by=by)
        attempt(1, width=WIDTH + 1)  # refused: another model
    assert starts == [0, 11, 11, 11]
    below = attempt(-signal.SIGKILL, poisoned=POISONED)
    why = "steps after 10 are passed over: 3 attempts in a row have died without getting past step"
    assert below.row("passed_over")["passed_over"] == f"{why} 11"
    assert below.row("restored")["reasons"] == [f"{why} 11"]
    assert below.row("restored")["lost"] == 1
    attempt(-signal.SIGKILL, poisoned=POISONED)
    assert starts[4:] == [10, 8]
    with open_store(store) as opened:
        held = read_catalog(opened.tiers, "e2e")
        first = min(manifest.term for manifest in held.manifests.values())
    cured = attempt(0)
    assert cured.row("restored")["restored"] == 4
    assert cured.row("final")["digest"] == reference[STEPS][0]
    for _ in range(4):  # finished, and started again
        assert attempt(0).row("passed_over") == {"passed_over": ""}
    assert starts[7:] == [STEPS] * 4
    assert [ref.step for ref in held.deltas[first, "p000000"]] == list(range(1, POISONED))
    with open_store(store) as opened:
        rows = [row for row in log(opened, "e2e") if isinstance(row, TermRow)]
        claims = [item for item in read_catalog(opened.tiers, "e2e").claims if not item.excuse]
        findings = [item for item in fsck(opened, "e2e") if getattr(item, "severity", "")]
    assert [item.kind for item in findings if item.severity == "damage"] == []
    assert [(row.term, row.claim) for row in rows] == [(item.term, item.index) for item in claims]
    said = [row.excuse for row in rows]
    refused = [index for index, text in enumerate(said) if text.startswith("ModelMismatchError")]
    assert refused == [1, 3, 5, 7]
    assert [index for index, text in enumerate(said) if text == "ended"] == [10, 11, 12, 13, 14]


def test_no_ceiling_where_none_is_wanted(tmp_path):
    """With 0 every attempt begins at the newest step."""
    store = (tmp_path / "store").as_uri()
    for number in range(5):
        how = {"width": WIDTH, "poisoned": 3, "given": {"max_deaths": 0}}
        worker = Worker(tmp_path / f"w{number}", store, **how)
        assert worker.wait() == -signal.SIGKILL
        assert worker.row("restored")["restored"] == (2 if number else 0)
