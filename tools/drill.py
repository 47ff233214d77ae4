"""Rehearse losses on a store: restore from what would be left; what is lost, how long it takes.

Nothing is changed and nothing is copied: each rehearsal sees the tiers themselves through a layer
in which some of them, or some objects, are gone or damaged. What it reads it verifies and folds
like any restore; the state is let go window by window instead of being kept.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from adacheck_store.ahead import Ahead
from adacheck_store.candidates import carry_out
from adacheck_store.catalog import read_catalog
from adacheck_store.fetch import Fetcher
from adacheck_store.format.errors import RecordNotFoundError, RestoreError, TierReadOnlyError
from adacheck_store.format.ids import Buffer
from adacheck_store.reading import open_fold, open_layout, read_extra
from adacheck_store.recovery import RestorePlan
from adacheck_store.restore import Certificate, certify
from adacheck_store.store import Store
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.objects import Objects
from adacheck_store.tiers.s3_client import requests_in
from adacheck_store.tiers.zarr import ZarrTier

from .ls import line_prover
from .rows import Progress, choose_run, silent
from .whole import Nowhere

RESTORED, NOTHING = "restored", "nothing left"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRow:
    """A loss, and the restore after it.

    ``harmed`` names the objects that the loss is of, empty where it is of whole tiers.
    ``expected``: a loss that a store is made for, of processes and disks; the others befall the far
    tier, where a young run may have one base alone. ``newest`` is the newest step that any tier has
    now, ``step`` the one restored (None where ``outcome`` is that nothing is left), ``lost`` the
    steps between: the RPO. ``seconds`` from the first look at the tiers to the last byte verified
    and folded: the RTO, but for the start of processes and the copy into the model. ``nbytes`` and
    ``requests`` were read for it, ``reasons`` say why no newer step was taken.
    """

    run: str
    loss: str
    harmed: tuple[str, ...]
    expected: bool
    outcome: str
    newest: int
    step: int | None
    lost: int
    seconds: float
    nbytes: int
    requests: int
    tiers: Mapping[str, int]
    certificate: Certificate | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """Something to lose: in words, and the tiers that are left; the rest as in `DrillRow`."""

    words: str
    left: Sequence[Tier]
    expected: bool = False
    harmed: tuple[str, ...] = ()


class Harmed:
    """Objects of which some are gone and some have a bit flipped; read-only."""

    def __init__(
        self, objects: Objects, gone: Iterable[str] = (), flipped: Iterable[str] = ()
    ) -> None:
        self.path, self.parallel = objects.path, objects.parallel
        self._objects, self._gone, self._flipped = objects, frozenset(gone), frozenset(flipped)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object as the harm has left them."""
        if name in self._gone:
            raise RecordNotFoundError("no such object (in this rehearsal)", path=name)
        data = self._objects.get(name, start, length)
        if name not in self._flipped or not data:
            return data
        return bytes([data[0] ^ 1]) + data[1:]

    def list(self, prefix: str, most: int | None = None) -> Iterator[str]:
        """Names of what is left."""
        names = self._objects.list(prefix, None if self._gone else most)
        left = (name for name in names if name not in self._gone)
        yield from islice(left, most)

    def put(self, name: str, buffers: Sequence[Buffer], if_absent: bool = False) -> bool:
        """Refused."""
        raise TierReadOnlyError("a rehearsal changes nothing", path=self.path)

    def delete(self, names: Iterable[str]) -> None:
        """Refused."""
        raise TierReadOnlyError("a rehearsal changes nothing", path=self.path)

    def sync(self) -> None:
        """Nothing was put."""

    def written_at(self, name: str) -> float:
        """As below."""
        return self._objects.written_at(name)

    def probe(self, name: str) -> None:
        """Nothing is asked of the server."""

    def dated(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Names of what is left, and when it was put."""
        return (item for item in self._objects.dated(prefix) if item[0] not in self._gone)

    def now(self) -> float:
        """As below."""
        return self._objects.now()

    def unfinished(self, age_s: float = 0.0) -> int:
        """As below."""
        return self._objects.unfinished(age_s)

    def sweep(self, age_s: float = 0.0) -> int:
        """Refused."""
        raise TierReadOnlyError("a rehearsal changes nothing", path=self.path)

    def requests(self) -> Mapping[str, int]:
        """As below."""
        return self._objects.requests()


def drill(
    store: Store, run: str = "", *, seed: int = 0, progress: Progress = silent
) -> Iterator[DrillRow]:
    """Rehearse every loss on a run; ``seed`` chooses which objects are harmed.

    Raises `UsageError`, or `RestoreError` for a store without the run.
    """
    name = choose_run(store, run)
    prover = line_prover(read_catalog(store.tiers, name))
    newest = max(prover.seen_steps(), default=-1) if prover else -1
    for loss in losses(store, name, random.Random(seed)):
        yield _rehearse(loss, name, newest, progress)


def exit_code(rows: Sequence[DrillRow]) -> int:
    """1 if what a store is for would fail: processes or disks gone, and nothing left."""
    return int(any(row.expected and row.outcome == NOTHING for row in rows))


def losses(store: Store, run: str, chance: random.Random) -> Iterator[Loss]:
    """What a store can lose."""
    far = store.far.traits.name
    yield Loss("every process", store.tiers, expected=True)
    if store.uppers:
        near = ", ".join(tier.traits.name for tier in store.uppers)
        yield Loss(f"every process, {near}", [store.far], expected=True)
        yield Loss(f"every process, {far}", store.uppers)
    if not isinstance(store.far, ZarrTier):
        return
    groups = _groups(store.far.objects, run)
    for harm, kind, whole in (
        ("a bit of the newest base flips", "base", False),
        ("the newest base is deleted", "base", True),
        ("an object of the newest deltas is deleted", "pack", False),
    ):
        newest = max((step for found, step in groups if found == kind), default=None)
        if newest is None:
            continue
        names = chance.choice(groups[kind, newest])
        if not whole:
            names = [chance.choice([name for name in names if "/c/" in name] or names)]
        flip = kind == "base" and not whole
        harmed = Harmed(
            store.far.objects, gone=() if flip else names, flipped=names if flip else ()
        )
        words = f"all but {far}, where {harm}"
        yield Loss(words, [ZarrTier(harmed, far)], harmed=tuple(names))


def _groups(objects: Objects, run: str) -> dict[tuple[str, int], list[list[str]]]:
    """Names of objects by kind and last step: a list for each record or pack."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in objects.list(f"{run}/"):
        words = name.split("/")
        if len(words) > 5 and words[3] in ("base", "pack"):
            found["/".join(words[:5])].append(name)
    groups: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for lead, names in found.items():
        kind, group = lead.split("/")[3:]
        step = group.split("-")[kind == "pack"]
        if step.isdigit():
            groups[kind, int(step)].append(names)
    return groups


def _rehearse(loss: Loss, run: str, newest: int, progress: Progress) -> DrillRow:
    """One restore from what is left, into nowhere."""
    tiers = loss.left
    before = sum(requests_in(_requests(tier)) for tier in tiers)
    began = time.monotonic()

    def row(**found: Any) -> DrillRow:
        after = sum(requests_in(_requests(tier)) for tier in tiers)
        return DrillRow(
            run=run, loss=loss.words, harmed=loss.harmed, expected=loss.expected, newest=newest,
            seconds=time.monotonic() - began, requests=after - before, **found,
        )  # fmt: skip

    def work(fetcher: Fetcher, plan: RestorePlan) -> Certificate:
        for refs in plan.extras.values():
            read_extra(fetcher, refs)
        reports = []
        for part in plan.parts:
            fold = open_fold(fetcher, open_layout(tiers, run, part.layout), part)
            sink = Nowhere(lambda done: progress(loss.words, done, 0))
            with Ahead(fetcher.parallel) as reader:
                reports.append(fold.run(sink, reader))
        return certify(plan, reports, fetcher)

    try:
        done = carry_out(tiers, run, work)
    except RestoreError as error:
        return row(
            outcome=NOTHING, step=None, lost=newest + 1, nbytes=0, tiers={}, certificate=None,
            reasons=(str(error),),
        )  # fmt: skip
    return row(
        outcome=RESTORED, step=done.plan.step, lost=newest - done.plan.step,
        nbytes=sum(done.fetcher.used.values()), tiers=dict(done.fetcher.used),
        certificate=done.result, reasons=done.reasons,
    )  # fmt: skip


def _requests(tier: Tier) -> Mapping[str, int]:
    objects = getattr(tier, "objects", None)
    return objects.requests() if objects is not None else {}
