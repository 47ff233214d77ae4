"""What a record says: one by its key, or all that belong to a step of the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from adacheck_store.arrays import tensor_of
from adacheck_store.catalog import read_catalog
from adacheck_store.format.bodies import Groups, decode_base, decode_delta, decode_extra
from adacheck_store.format.canonical import ArrayRef, Scalar
from adacheck_store.format.errors import (
    AdaCheckError,
    ForkError,
    MalformedError,
    NotProvableError,
    RecordNotFoundError,
    UsageError,
)
from adacheck_store.format.head import Head, SealedHead
from adacheck_store.format.keys import parse_key
from adacheck_store.format.layout import decode_layout
from adacheck_store.format.manifest import decode_manifest
from adacheck_store.parting import offered
from adacheck_store.recovery import Prover, RestorePlan, tolerant_line
from adacheck_store.redundancy.listing import summary
from adacheck_store.store import Store

from .rows import all_refs, choose_run


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRow:
    """An array of a record."""

    name: str
    dtype: str
    elements: int
    nbytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """A record: where it lies, its links, its arrays, and what its body says."""

    key: str
    tiers: tuple[str, ...]
    id: str
    kind: str
    run: str
    term: str
    part: str
    step: int | None
    parent: str
    manifest: str
    layout: str
    nbytes: int
    info: str
    arrays: tuple[ArrayRow, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A step: whether heads and links prove it, from which base, over how many deltas, or why not.

    ``records`` are the keys that belong to the step itself.
    """

    run: str
    step: int
    term: str
    provable: bool
    base: str
    deltas: int
    why: str
    records: tuple[str, ...]


def show(store: Store, what: str, run: str = "") -> Iterator[StepRow | RecordRow]:
    """A record by its key (with or without the run's name), or a step by its number.

    Raises `RecordNotFoundError`, `NotProvableError` for a step nothing is known of, `UsageError`.
    """
    name = choose_run(store, run or _run_of(store, what))
    if what.isascii() and what.isdigit():
        yield from show_step(store, name, int(what))
        return
    text = what if what.startswith(f"{name}/") else f"{name}/{what}"
    try:
        key = parse_key(text)
    except MalformedError as error:
        raise UsageError(
            f"neither a step nor a record's key: {what[:200]!r}", run=name,
            hint="give a number, or a key as ls and fsck print them",
        ) from error  # fmt: skip
    yield show_record(store, str(key))


def _run_of(store: Store, what: str) -> str:
    """A key's first word names its run, where one is called so."""
    first, slash, _ = what.partition("/")
    if not slash:
        return ""
    for tier in store.tiers:
        if next(iter(tier.list(f"{first}/")), None) is not None:
            return first
    return ""


def show_step(store: Store, run: str, step: int) -> Iterator[StepRow | RecordRow]:
    """A step of the line and the records that belong to it."""
    catalog = read_catalog(store.tiers, run)
    prover = Prover(catalog, tolerant_line(catalog))
    segment = prover.segment_of(step)
    terms = {segment.term} if segment else set()
    refs = [ref for ref in all_refs(catalog) if ref.step == step and ref.term in terms]
    if not refs:
        seen = prover.seen_steps()
        span = f"the line has {seen[-1]} to {seen[0]}" if seen else "the line has no steps"
        raise NotProvableError(f"nothing is known of step {step}", run=run, step=step, hint=span)
    plan = offered(store.tiers, prover, step)
    good = isinstance(plan, RestorePlan)
    longest = (
        max(plan.parts, key=lambda p: len(p.deltas)) if isinstance(plan, RestorePlan) else None
    )
    yield StepRow(
        run=run, step=step, term=segment.term if segment else "", provable=good,
        base=longest.base.key if longest else "", deltas=len(longest.deltas) if longest else 0,
        why="" if isinstance(plan, RestorePlan) else plan, records=tuple(ref.key for ref in refs),
    )  # fmt: skip
    for key in dict.fromkeys(ref.key for ref in refs):
        yield show_record(store, key)


def show_record(store: Store, key: str) -> RecordRow:
    """A record by its key, from the first tier that has it right."""
    found: dict[str, list[str]] = {}
    sealed: SealedHead | None = None
    errors: list[AdaCheckError] = []
    for tier in store.tiers:
        try:
            head = tier.head(key)
        except AdaCheckError as error:
            if not isinstance(error, RecordNotFoundError):
                errors.append(error)
            continue
        sealed = sealed or head
        found.setdefault(head.id, []).append(tier.traits.name)
    if sealed is None:
        if errors:
            raise errors[0]
        raise RecordNotFoundError("no such record", key=key, path=store.url, hint="see ls, log")
    if len(found) > 1:
        raise ForkError(
            f"tiers hold {len(found)} records under this key", key=key, hint="fsck names them"
        )
    return record_row(key, sealed, tuple(found[sealed.id]))


def record_row(key: str, sealed: SealedHead, tiers: tuple[str, ...]) -> RecordRow:
    """The row of a head."""
    head = sealed.head
    arrays = tuple(
        ArrayRow(name=a.name, dtype=a.dtype, elements=a.elements, nbytes=a.nbytes,
                 blocks=len(a.digests))
        for a in head.arrays
    )  # fmt: skip
    return RecordRow(
        key=key, tiers=tiers, id=sealed.id, kind=head.kind, run=head.run, term=head.term,
        part=head.part, step=head.step, parent=head.parent, manifest=head.manifest,
        layout=head.layout, nbytes=sum(a.nbytes for a in arrays) + len(sealed.raw),
        info=sealed.info, arrays=arrays, body=body_of(head),
    )  # fmt: skip


def body_of(head: Head) -> dict[str, Any]:
    """What a head's body says, for people: numbers as numbers, long lists as counts."""
    match head.kind:
        case "delta":
            return _delta_body(head)
        case "base":
            base = decode_base(head)
            sections = {
                name: {"present": sum(state.present), "slices": len(state.present),
                       "counters": {k: _span(v) for k, v in state.scalars.items()}}
                for name, state in base.states.items()
            }  # fmt: skip
            return {
                "origin": base.origin, "class": base.exactness, "gap": base.gap,
                "sections": sections, "hyperparameters": groups_of(base.boundary),
            }  # fmt: skip
        case "extra":
            extra = decode_extra(head)
            tree = {name: readable(value) for name, value in extra.tree.items()}
            return {"tree": tree, "refers_to": dict(extra.refs)}
        case "layout":
            return _layout_body(head)
        case "manifest":
            manifest = decode_manifest(head)
            said = {k: readable(v) for k, v in head.body.items() if k != "redundancy"}
            found = {"redundancy": summary(manifest)} if manifest.redundancy else {}
            return said | found
        case _:
            return {name: readable(value) for name, value in head.body.items()}


def _delta_body(head: Head) -> dict[str, Any]:
    body = decode_delta(head)
    updates = []
    for update in body.updates:
        encodings: dict[str, int] = {}
        for grad in update.grads:
            word = grad.encoding + ("" if grad.scale is None else " x scale")
            encodings[word] = encodings.get(word, 0) + 1
        updates.append(
            {"optimizer": update.optimizer, "gradients": encodings, "absent": len(update.absent),
             "hyperparameters": groups_of((update.groups,))}
        )  # fmt: skip
    return {
        "updates": updates,
        "set": [f"{item.section}/{item.role}[{item.slice}]" for item in body.sets],
        "hyperparameters": groups_of(body.boundary),
        "fingerprints": sum(len(item.sums) for item in body.fingerprints),
        "arithmetic": list(body.arithmetic),
    }


def _layout_body(head: Head) -> dict[str, Any]:
    layout = decode_layout(head)
    sections = [
        {
            "name": section.name,
            "optimizer": layout.optimizers[section.optimizer] if section.optimizer >= 0 else "",
            "roles": dict(section.roles),
            "elements": section.elements,
            "slices": [
                {"name": piece.name, "shape": list(piece.shape), "whole": piece.whole,
                 "group": piece.group, "aliases": list(piece.aliases)}
                for piece in section.slices
            ],
        }
        for section in layout.sections
    ]  # fmt: skip
    return {"optimizers": list(layout.optimizers), "sections": sections}


def groups_of(boundary: tuple[Groups, ...]) -> list[Any]:
    """Hyper-parameters per optimizer and group."""
    return [[readable(dict(group)) for group in groups] for groups in boundary]


def readable(value: Any) -> Any:
    """A typed value as JSON that people can read; bytes and long texts are cut."""
    if isinstance(value, Scalar):
        return plain_scalar(value)
    if isinstance(value, ArrayRef):
        return f"<{value.dtype} {list(value.shape)} in {value.array}>"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {str(key): readable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [readable(item) for item in value[:64]]
        return items if len(value) <= 64 else [*items, f"... {len(value)} in all"]
    return value


def plain_scalar(value: Any) -> Any:
    """A typed scalar as a Python number."""
    if not isinstance(value, Scalar):
        return value
    return tensor_of(value).item()


def _span(values: tuple[Any, ...]) -> Any:
    """Per-slice counters as one value, or as least and greatest."""
    known = [plain_scalar(v) if isinstance(v, Scalar) else v for v in values if v is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    return low if low == high else f"{low}..{high}"
