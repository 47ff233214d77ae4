"""Messages: what agents and trainers tell each other of a run, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.errors import AdaCheckError, MalformedError
from adacheck_store.format.head import SealedHead
from adacheck_store.format.manifest import decode_manifest
from adacheck_store.tiers.wire import decode_json

from .events import Opened
from .marks import Mark, Report, Seat


def opening_bytes(opened: Opened, endpoints: Mapping[str, str]) -> bytes:
    """A term's opening, and where the agents of its nodes are reached."""
    return to_bytes({
        "term": opened.term, "k": opened.k, "domains": dict(opened.domains),
        "endpoints": dict(endpoints), "seats": _seats(opened.seats),
        "reserve": {chain: list(sizes) for chain, sizes in opened.reserve.items()},
        "manifests": [
            [identity, manifest.seal().raw.decode()]
            for identity, manifest in sorted(opened.manifests.items())
        ],
    })  # fmt: skip


def read_opening(data: bytes, token: str = "") -> tuple[Opened, dict[str, str]]:
    """Inverse of `opening_bytes`; raises `MalformedError`."""
    try:
        said = strict.fields(
            decode_json(data), "term", "k", "domains", "endpoints", "seats", "reserve",
            "manifests",
        )  # fmt: skip
        manifests = {}
        for item in strict.items(said["manifests"]):
            identity, raw = strict.items(item, 2)
            sealed = SealedHead.open(_raw(raw), strict.text(identity))
            manifests[sealed.id] = decode_manifest(sealed.head)
        opened = Opened(
            term=strict.text(said["term"]), manifests=manifests, seats=_read_seats(said["seats"]),
            domains=_texts(said["domains"]), k=strict.count(said["k"]), token=token,
            reserve={
                chain: (strict.count(sizes[0]), strict.count(sizes[1]))
                for chain, item in strict.fields(said["reserve"]).items()
                for sizes in [strict.items(item, 2)]
            },
        )  # fmt: skip
        return opened, _texts(said["endpoints"])
    except ValueError as error:
        raise MalformedError(f"an opening: {error}"[:200], rule="call") from error


def report_bytes(report: Report) -> bytes:
    """What an agent says of itself."""
    return to_bytes({
        "node": report.node, "boot": report.boot, "term": report.term,
        "watermark": report.watermark, "refused": sorted(report.refused),
        "seats": _seats(report.seats),
        "marks": {
            chain: [mark.term, [list(span) for span in mark.spans], mark.tip, mark.settled]
            for chain, mark in report.marks.items()
        },
    })  # fmt: skip


def read_report(data: bytes) -> Report:
    """Inverse of `report_bytes`; raises `MalformedError`."""
    try:
        said = strict.fields(
            decode_json(data), "node", "boot", "term", "watermark", "refused", "seats", "marks"
        )
        marks = {}
        for chain, item in strict.fields(said["marks"]).items():
            term, spans, tip, settled = strict.items(item, 4)
            pairs = tuple(_span(span) for span in strict.items(spans))
            marks[chain] = Mark(
                strict.text(term, empty=True), pairs, strict.text(tip, empty=True),
                strict.integer(settled),
            )  # fmt: skip
        return Report(
            node=strict.text(said["node"]), boot=strict.text(said["boot"]),
            term=strict.text(said["term"], empty=True), marks=marks,
            seats=_read_seats(said["seats"]), watermark=strict.integer(said["watermark"]),
            refused=frozenset(strict.text(name) for name in strict.items(said["refused"])),
        )  # fmt: skip
    except ValueError as error:
        raise MalformedError(f"a report: {error}"[:200], rule="call") from error


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """A message's bytes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def read_json(data: bytes) -> dict[str, Any]:
    """A message's JSON object; raises `MalformedError`."""
    try:
        return dict(strict.fields(decode_json(data)))
    except (ValueError, AdaCheckError) as error:
        raise MalformedError(f"a message: {error}"[:200], rule="call") from error


def _raw(item: Any) -> bytes:
    if not isinstance(item, str):
        raise ValueError("a manifest that is no text")
    return item.encode()


def _span(item: Any) -> tuple[int, int]:
    first, last = (strict.integer(step) for step in strict.items(item, 2))
    if first > last:
        raise ValueError(f"steps {first} to {last}")
    return first, last


def _seats(seats: Mapping[str, Seat]) -> dict[str, Any]:
    return {chain: [seat.version, list(seat.holders)] for chain, seat in seats.items()}


def _read_seats(value: Any) -> dict[str, Seat]:
    seats = {}
    for chain, item in strict.fields(value).items():
        version, holders = strict.items(item, 2)
        names = tuple(strict.text(name) for name in strict.items(holders))
        seats[chain] = Seat(strict.count(version), names)
    return seats


def _texts(value: Any) -> dict[str, str]:
    return {
        name: strict.text(text, empty=True) for name, text in strict.fields(value).items()
    }  # fmt: skip
