"""All that is measured of peers, in one table: step time, the wire, recovery, transport, memory."""

from __future__ import annotations

from collections.abc import Iterator

from . import apart, recovery, resident, transport
from .rows import Row


def rows() -> Iterator[Row]:
    """The rows of all, one after the other."""
    for part in (apart, recovery, transport, resident):
        yield from part.rows()
