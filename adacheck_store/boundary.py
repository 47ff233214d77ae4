"""What a trainer hands over at a boundary, and where it goes in the chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from adacheck_store.format.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where the next record of a part hangs: everything a head needs besides its content.

    ``parent`` is the id that the next delta has as parent (the last delta's id, or at a new start
    the manifest revision's); ``manifest`` and ``layout`` are the ids in force.
    """

    run: str
    term: str
    part: str
    rank: str
    parent: str
    manifest: str
    layout: str


class Boundary(Protocol):
    """A closed boundary with its buffers, encoded later on the writer's thread.

    Either ``delta`` gives a record, or ``base`` does (a new start), or both (a captured base to
    check the chain against). After ``release`` the trainer may fill the buffers again.

    It may have a ``layout``, that of its records: where it is another than that of the boundary
    before, the chain starts anew, and only a base will do.
    """

    step: int

    def delta(self, link: Link) -> Record | None:
        """The delta that leads to this step, with ``link.parent`` as its parent."""
        ...

    def base(self, link: Link) -> Record | None:
        """A captured base of this step, with ``link.parent`` as its parent."""
        ...

    def extra(self, link: Link) -> Record:
        """The rank's extra of this step."""
        ...

    def release(self) -> None:
        """The records have been stored (or given up): the buffers are free."""
        ...
