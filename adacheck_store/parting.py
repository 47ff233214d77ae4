"""Parting: whether a step's copies on several ranks were equal, by what each rank tells of them.

Of a state with copies one rank's records are read for all. That is right as long as the witnesses
in all ranks' extras agree; where they do not the step is not to be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import rank_name

from .arrays import byte_view
from .fetch import ArrayReader, BlocksLostError, Fetcher, lost_if_malformed
from .group import Group, share
from .recovery import RestorePlan
from .redundancy.witness import Witness, compare, shared_by


def parted(fetcher: Fetcher, plan: RestorePlan, group: Group) -> str:
    """Why a planned step is not to be taken, naming tensors and ranks; empty if nothing is wrong.

    Each rank of the group reads its own extra, and as many others as there is nobody else to read.
    All ranks call it.
    """
    found = plan.manifest.redundancy
    parts = [entry.name for entry in plan.manifest.parts]
    size = len(plan.manifest.ranks)
    if found is None or not any(shared_by(found, parts, rank) for rank in range(size)):
        return ""
    mine = range(group.rank, size, group.size)
    told = share(group, "witnesses", lambda: [_told(fetcher, plan, rank) for rank in mine])
    said = [told[rank % group.size][rank // group.size] for rank in range(size)]
    for rank, each in enumerate(said):
        if each and "why" in each:
            return f"the extra of rank {rank} cannot be read: {each['why']}"
    verdict = compare(found, parts, {rank: _heard(each) for rank, each in enumerate(said)})
    return str(verdict)


def _told(fetcher: Fetcher, plan: RestorePlan, rank: int) -> dict[str, Any] | None:
    """A rank's witness of the plan's step, as JSON, or why it cannot be read."""
    ref = plan.extras[rank_name(rank)][0]
    try:
        reader = ArrayReader(fetcher, ref)
        with lost_if_malformed(ref):
            said = decode_extra(reader.head).tree.get("witness")
        digests = said.get("digests") if isinstance(said, Mapping) else None
        if not isinstance(said, Mapping) or not isinstance(digests, ArrayRef):
            return None
        held = reader.elements(digests.array, 0, reader.head.array(digests.array).elements)
    except (BlocksLostError, AdaCheckError) as error:
        return {"why": str(error)[:400].encode("utf-8", "replace").decode()}
    return {"since": said.get("since"), "digests": bytes(byte_view(held)).hex()}


def _heard(said: Mapping[str, Any] | None) -> Witness | None:
    if said is None or type(said.get("since")) is not int:
        return None
    return Witness(since=said["since"], digests=bytes.fromhex(strict.text(said["digests"])))
