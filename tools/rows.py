"""What all verbs share: progress, ranges of steps, the run that is meant, rows as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from adacheck_store.catalog import Catalog, RecordRef, list_runs
from adacheck_store.format.errors import AdaCheckError, RestoreError, UsageError
from adacheck_store.format.keys import check_run
from adacheck_store.store import Store
from adacheck_store.tiers.base import Tier

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is (0: unknown)."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def runs_of(store: Store) -> list[str]:
    """Names of all runs in a store; a tier that cannot be listed is passed over."""
    names: set[str] = set()
    for tier in store.tiers:
        try:
            names.update(list_runs([tier]))
        except AdaCheckError:
            continue
    return sorted(names)


def choose_run(store: Store, run: str = "") -> str:
    """The run that is meant: the one named, or the only one there is.

    Raises `NameRefusedError`, `UsageError` naming the runs there are, or `RestoreError` for a
    store without any.
    """
    if run:
        check_run(run)
    runs = runs_of(store)
    if run in runs:
        return run
    if not runs:
        raise RestoreError(
            "the store holds no run", path=store.url, hint="check the URL; a writer begins a run"
        )
    listed = ", ".join(runs[:20]) + (" ..." if len(runs) > 20 else "")
    if run:
        raise UsageError("no such run", run=run, path=store.url, hint=f"--run NAME, of: {listed}")
    if len(runs) > 1:
        raise UsageError(
            f"the store holds {len(runs)} runs", path=store.url, hint=f"--run NAME, of: {listed}"
        )
    return runs[0]


def ranges(steps: Iterable[int]) -> str:
    """Steps as text: ``0..8, 10, 12..40``; empty without steps."""
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in spans(steps))


def spans(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Steps as inclusive ranges."""
    found: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def all_refs(catalog: Catalog) -> list[RecordRef]:
    """Every base, delta and extra of a catalog, ordered by key."""
    tables = (catalog.bases, catalog.deltas, catalog.extras, catalog.derived)
    refs = (ref for table in tables for found in table.values() for ref in found)
    return sorted(refs, key=lambda ref: (ref.key, ref.id))


def held_alone(catalog: Catalog, tier: Tier, run: str) -> Catalog:
    """What one tier of a catalog holds; lists the tier's manifests."""
    name = tier.traits.name

    def keep(table: Mapping[tuple[str, str], Sequence[RecordRef]]) -> dict[Any, Any]:
        kept = {
            place: tuple(dataclasses.replace(r, tiers=(name,)) for r in refs if name in r.tiers)
            for place, refs in table.items()
        }
        return {place: refs for place, refs in kept.items() if refs}

    held: set[tuple[str, int]] = set()
    for term in {manifest.term for manifest in catalog.manifests.values()}:
        for key in tier.list(f"{run}/{term}/manifest/"):
            held.add((term, int(key.rsplit("/", 1)[1])))
    return dataclasses.replace(
        catalog,
        manifests={i: m for i, m in catalog.manifests.items() if (m.term, m.step) in held},
        layouts={i: (name,) for i, tiers in catalog.layouts.items() if name in tiers},
        bases=keep(catalog.bases),
        deltas=keep(catalog.deltas),
        extras=keep(catalog.extras),
        derived=keep(catalog.derived),
        troubles=tuple(trouble for trouble in catalog.troubles if trouble.tier == name),
    )


def to_json(row: Any) -> Any:
    """A row (a dataclass) as plain data with its type's name, for ``--json``."""
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        fields = {f.name: to_json(getattr(row, f.name)) for f in dataclasses.fields(row)}
        return {"row": type(row).__name__, **fields}
    if isinstance(row, Mapping):
        return {str(key): to_json(value) for key, value in row.items()}
    if isinstance(row, tuple | list | set | frozenset):
        return [to_json(item) for item in row]
    if row is None or isinstance(row, str | int | float | bool):
        return row
    return str(row)


def error_json(error: AdaCheckError) -> dict[str, Any]:
    """An error as plain data."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "place": {name: to_json(value) for name, value in error.place.items()},
        "exit_code": error.exit_code,
    }


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int) -> str:
    """Bytes as ``1.5 MiB``."""
    value = float(nbytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"
