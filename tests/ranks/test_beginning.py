"""A term of another topology goes on from an exact fork without uploading its state anew.

Real ranks, killed by SIGKILL, and then everything is lost but the far tier.
"""

import shutil

import pytest

from adacheck_store.catalog import read_catalog
from adacheck_store.format.keys import part_name
from adacheck_store.recovery import Prover, tolerant_line
from adacheck_store.store import open_store
from adacheck_store.tools.compact import compact
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.gc import Ages, gc
from tests.ranks.test_topology import checked, known_of
from tests.ranks.worker import Launcher
from tests.waits import until

pytestmark = pytest.mark.fault

WIDTH = 1500
SPARSE = {"base_every": 10_000, "object_lag": 2, "redundancy": "off"}
"""No base but those that terms begin with (one comes where copies are found)."""


class Run:
    """A run that loses, after every leg, every process and all but the far tier."""

    def __init__(
        self, tmp_path, kind: str, ranks: int, url: str = "", env: dict[str, str] | None = None
    ) -> None:  # fmt: skip
        self.store = tmp_path / "store"
        self.url = url or self.store.as_uri()
        self.near, self.env = self.store / "lmdb", env or {}
        self.launcher = Launcher(tmp_path, kind, ranks)
        self.known: dict[int, dict] = {}
        self.last = 0

    def leg(self, kind: str, ranks: int) -> int:
        """Restore what there is, train a few steps, die; the step restored."""
        attempt = self.launcher.start(
            self.url, ranks=ranks, kind=kind, wholes=True, hold=self.last + 4,
            sizes={"width": WIDTH}, given=dict.fromkeys(range(ranks), SPARSE), env=self.env,
        )  # fmt: skip
        attempt.until(self.last + 4)
        until(lambda: self.proven() == self.last + 4, "all drained")
        attempt.kill(ranks - 1)
        step = checked(attempt, self.known, ranks) if self.known else 0
        self.known |= known_of(attempt)
        self.last = attempt.last_step()
        self.lose()
        return step

    def back(self, kind: str, ranks: int) -> int:
        """Restore, bit for bit, and end; the step."""
        attempt = self.launcher.start(
            self.url, ranks=ranks, kind=kind, wholes=True, inspect=True, sizes={"width": WIDTH},
            given=dict.fromkeys(range(ranks), SPARSE), env=self.env,
        )  # fmt: skip
        assert attempt.wait() == [0] * ranks
        self.lose()
        return checked(attempt, self.known, ranks)

    def lose(self) -> None:
        """All but the far tier."""
        shutil.rmtree(self.near, ignore_errors=True)

    def far(self):
        """What the far tier holds."""
        with open_store(self.url) as opened:
            return read_catalog([opened.far], "e2e")

    def proven(self) -> int:
        """The newest step that the far tier can produce alone."""
        catalog = self.far()
        if catalog.empty:
            return -1
        return max(Prover(catalog, tolerant_line(catalog)).provable_steps(), default=-1)

    def is_clean(self) -> bool:
        """Whether fsck finds nothing but what a killed writer may leave."""
        with open_store(self.url) as opened:
            found = [row for row in fsck(opened) if hasattr(row, "severity")]
        return not [row for row in found if row.severity == "damage"]

    def flipped(self, term: str) -> list:
        """What fsck says where a byte of a term's base of its first rank has changed; put back."""
        folder = self.store / "objects" / "e2e" / term / part_name(0) / "base"
        chunk = max(
            (path for path in folder.rglob("*") if path.is_file() and "c" in path.parts),
            key=lambda path: path.stat().st_size,
        )
        right = chunk.read_bytes()
        try:
            chunk.write_bytes(right[:100] + bytes([right[100] ^ 1]) + right[101:])
            with open_store(self.url) as opened:
                return [row for row in fsck(opened) if hasattr(row, "severity")]
        finally:
            chunk.write_bytes(right)

    def collect(self) -> None:
        """What may go by then goes at once."""
        with open_store(self.url, write=True) as opened:
            list(gc(opened, "e2e", last=1, apply=True, ages=Ages(grace_s=0.0)))


@pytest.mark.parametrize(
    "legs",
    [
        [("fsdp2", 2), ("one", 1), ("fsdp2", 3)],
        pytest.param([("copies", 2), ("fsdp2", 2), ("copies", 2)], marks=pytest.mark.slow),
    ],
)
def test_no_state_is_uploaded_and_all_comes_back(tmp_path, legs):
    """Two forks within one interval of bases, each followed by the loss of all but the far tier."""
    run = Run(tmp_path, *legs[0])
    newest = forked(run, legs)
    first = tolerant_line(run.far())[0].term
    found = run.flipped(first)
    (block,) = [row for row in found if row.kind == "block"]
    assert f"{first}/{part_name(0)}/base/" in block.key
    lost = [row.what for row in found if row.kind == "gap"]
    assert f"begins with what all parts of term {first} had at step" in " ".join(lost)
    assert run.back("one", 1) == newest
    freed(run, legs, newest)


def forked(run: Run, legs) -> int:
    """Leg after leg: what the far tier gets, keeps and gives; the newest step that it proves."""
    run.leg(*legs[0])
    for kind, ranks in legs[1:]:
        before = {manifest.term for manifest in run.far().manifests.values()}
        last = run.last
        step = run.leg(kind, ranks)
        assert step == last, "the far tier had it"
        far = run.far()
        (term,) = {manifest.term for manifest in far.manifests.values()} - before
        assert not [place for place in far.bases if place[0] == term], "a state was uploaded"
        derived = [ref for place, refs in far.derived.items() if place[0] == term for ref in refs]
        assert {ref.part for ref in derived} == {part_name(rank) for rank in range(ranks)}
        state = sum(ref.nbytes for refs in far.bases.values() for ref in refs)
        assert sum(ref.nbytes for ref in derived) < state / 20
        assert all(ref.step == step for ref in derived)
        run.collect()
        assert run.is_clean()
        assert run.proven() == run.last
    return run.proven()


def freed(run: Run, legs, newest: int) -> None:
    """A base of its own makes the last term independent, and what it began with may go."""
    with open_store(run.url, write=True) as opened:
        rows = list(compact(opened, "e2e", to=newest))
        assert {row.done for row in rows} == {"folded"}
    run.collect()
    far = run.far()
    line = tolerant_line(far)
    assert not any(far.deltas.get((line[0].term, part_name(rank))) for rank in range(legs[0][1]))
    assert run.is_clean()
    assert run.back(*legs[0]) == newest
