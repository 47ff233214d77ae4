"""Restore plans as JSON: what rank 0 sends to the other ranks; strict, typed, no pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.errors import GroupError
from adacheck_store.format.head import decode_head
from adacheck_store.format.manifest import decode_manifest

from .catalog import RecordRef
from .recovery import PartPlan, RestorePlan

REASONS_MAX = 50
TEXT_MAX = 2000
"""Characters of a reason that are passed on."""

PART = "part", "layout", "link", "base", "deltas"
"""The fields of a part by itself."""


def encode_plan(plan: RestorePlan) -> Any:
    """The plan as JSON; plans of fork steps stand beside it, each once, before what needs it."""
    made: list[Any] = []
    found = _encode(plan, made, {})
    return {**found, "origins": made}


def _encode(plan: RestorePlan, made: list[Any], places: dict[int, int]) -> dict[str, Any]:
    """A plan; those of forks are added to ``made``, by ``places`` in it."""
    for origin in (part.origin for part in plan.parts):
        if origin is not None and id(origin) not in places:
            encoded = _encode(origin, made, places)
            places[id(origin)] = len(made)
            made.append(encoded)
    return {
        "run": plan.run, "term": plan.term, "step": plan.step, "newest": plan.newest,
        "manifest": plan.manifest.seal().raw.decode(), "manifest_id": plan.manifest_id,
        "parts": [
            {
                **_encode_part(part),
                "origin": -1 if part.origin is None else places[id(part.origin)],
                "ways": {place: _encode_part(way) for place, way in part.ways.items()},
            }
            for part in plan.parts
        ],
        "extras": {rank: [_encode_ref(r) for r in refs] for rank, refs in plan.extras.items()},
        "reasons": [_clean(reason) for reason in plan.reasons[:REASONS_MAX]],
        "passed_over": plan.passed_over,
    }  # fmt: skip


def _encode_part(part: PartPlan) -> dict[str, Any]:
    """A part by itself: ways have neither origins nor ways."""
    return {
        "part": part.part, "layout": part.layout, "link": part.link,
        "base": _encode_ref(part.base), "deltas": [_encode_ref(ref) for ref in part.deltas],
    }  # fmt: skip


def decode_plan(value: Any) -> RestorePlan:
    """Inverse of `encode_plan`; raises `GroupError` for anything else."""
    try:
        made: list[RestorePlan] = []
        for item in strict.items(strict.fields(value, "origins")["origins"]):
            made.append(_decode(item, made))
        return _decode(value, made)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise GroupError(
            f"rank 0 sent no restore plan: {error}"[:400],
            hint="start all ranks with the same version of adacheck-store",
        ) from error


def _decode(value: Any, made: Sequence[RestorePlan]) -> RestorePlan:
    found = strict.fields(
        value, "run", "term", "step", "newest", "manifest", "manifest_id", "parts", "extras",
        "reasons", "passed_over",
    )  # fmt: skip
    head = decode_head(found["manifest"].encode())
    return RestorePlan(
        run=strict.text(found["run"]), term=strict.text(found["term"]),
        step=strict.count(found["step"]), newest=strict.count(found["newest"]),
        manifest=decode_manifest(head), manifest_id=strict.text(found["manifest_id"]),
        parts=tuple(_decode_part(item, made) for item in strict.items(found["parts"])),
        extras={
            strict.text(rank): _refs(refs) for rank, refs in strict.fields(found["extras"]).items()
        },
        reasons=tuple(strict.text(text) for text in strict.items(found["reasons"])),
        passed_over=_name(found["passed_over"]),
    )  # fmt: skip


def _decode_part(value: Any, made: Sequence[RestorePlan]) -> PartPlan:
    found = strict.fields(value, "origin", "ways")
    origin = strict.integer(found["origin"])
    return replace(
        _decode_way(found),
        origin=None if origin == -1 else made[strict.count(origin)],
        ways={
            strict.text(place): _decode_way(way)
            for place, way in strict.fields(found["ways"]).items()
        },
    )


def _decode_way(value: Any) -> PartPlan:
    found = strict.fields(value, *PART)
    return PartPlan(
        part=strict.text(found["part"]), layout=strict.text(found["layout"]),
        link=strict.text(found["link"]), base=_decode_ref(found["base"]),
        deltas=_refs(found["deltas"]),
    )  # fmt: skip


def _refs(value: Any) -> tuple[RecordRef, ...]:
    return tuple(_decode_ref(item) for item in strict.items(value))


def _encode_ref(ref: RecordRef) -> dict[str, Any]:
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(ref)
        for value in [getattr(ref, field.name)]
    }


def _decode_ref(value: Any) -> RecordRef:
    found = strict.fields(value, *(field.name for field in fields(RecordRef)))
    return RecordRef(**{f.name: _CASTS[str(f.type)](found[f.name]) for f in fields(RecordRef)})


def _name(value: Any) -> str:
    return strict.text(value, empty=True)


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return None if value is None else dict(strict.fields(value))


_CASTS: dict[str, Callable[[Any], Any]] = {
    "str": _name,
    "int": strict.integer,
    "tuple[str, ...]": lambda value: tuple(_name(item) for item in strict.items(value)),
    "tuple[int, ...]": lambda value: tuple(strict.integer(item) for item in strict.items(value)),
    "Mapping[str, Any] | None": _mapping,
}
"""How a field of a `RecordRef` is read, by its annotation."""


def _clean(text: str) -> str:
    return text[:TEXT_MAX].encode("utf-8", "replace").decode() or "?"
