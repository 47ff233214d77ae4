"""Parting: whether a step's copies on several ranks were equal, by what each rank tells of them.

Of a state with copies one rank's records are read for all. That is right as long as the witnesses
in all ranks' extras agree; where they do not the step is not to be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_store.format import strict
from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.keys import rank_name
from adacheck_store.tiers.base import Tier

from .arrays import byte_view
from .fetch import ArrayReader, BlocksLostError, Fetcher, lost_if_malformed
from .group import SOLO, Group, share
from .recovery import Prover, RestorePlan
from .redundancy.witness import Witness, compare, shared_by

REASON_MAX = 2000
"""Characters of a reason that are kept."""

Harm = Mapping[str, Any]
"""Damage that a rank has met, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What witnesses say of a planned step: ``why`` it is not to be taken, naming tensors and
    ranks; empty if nothing is wrong. ``harms`` are those of extras that could not be read, if any:
    then nothing is known. ``damage`` is the first that this rank met.
    """

    why: str = ""
    harms: Sequence[Harm] = ()
    damage: BlocksLostError | None = None


def parted(fetcher: Fetcher, plan: RestorePlan, group: Group = SOLO) -> Parting:
    """Whether the copies of a planned step have come apart.

    Each rank of the group reads its own extra, and as many others as there is nobody else to read.
    All ranks call it.
    """
    found = plan.manifest.redundancy
    parts = [entry.name for entry in plan.manifest.parts]
    size = len(plan.manifest.ranks)
    if found is None or not any(shared_by(found, parts, rank) for rank in range(size)):
        return Parting()
    mine = range(group.rank, size, group.size)
    damages: list[BlocksLostError] = []

    def told_of(rank: int) -> dict[str, Any] | None:
        try:
            return _told(fetcher, plan, rank)
        except BlocksLostError as error:
            damages.append(error)
            return {"harm": harm_of(error)}

    told = share(group, "witnesses", lambda: [told_of(rank) for rank in mine])
    said = [told[rank % group.size][rank // group.size] for rank in range(size)]
    harms = [each["harm"] for each in said if each and "harm" in each]
    if harms:
        return Parting(harms=harms, damage=damages[0] if damages else None)
    verdict = compare(found, parts, {rank: _heard(each) for rank, each in enumerate(said)})
    return Parting(why=str(verdict))


def offered(tiers: Sequence[Tier], prover: Prover, step: int) -> RestorePlan | str:
    """The plan of a step that a restore takes without being asked for it, or why it does not."""
    plan = prover.prove(step)
    if isinstance(plan, str) or plan.manifest.redundancy is None:
        return plan
    if why := prover.doubt(step):
        return why
    parting = parted(Fetcher(tiers), plan)
    why = parting.why or "; ".join(harm["why"] for harm in parting.harms)
    return f"step {step}: {why}" if why else plan


def harm_of(error: BlocksLostError) -> dict[str, Any]:
    """A record that was lost, as JSON."""
    why = str(error)[:REASON_MAX].encode("utf-8", "replace").decode()
    return {"why": why, "lost": [list(pair) for pair in error.lost]}


def _told(fetcher: Fetcher, plan: RestorePlan, rank: int) -> dict[str, Any] | None:
    """A rank's witness of the plan's step, as JSON; raises `BlocksLostError`."""
    ref = plan.extras[rank_name(rank)][0]
    reader = ArrayReader(fetcher, ref)
    with lost_if_malformed(ref):
        said = decode_extra(reader.head).tree.get("witness")
        digests = said.get("digests") if isinstance(said, Mapping) else None
        if not isinstance(said, Mapping) or not isinstance(digests, ArrayRef):
            return None
        held = reader.elements(digests.array, 0, reader.head.array(digests.array).elements)
    return {"since": said.get("since"), "digests": bytes(byte_view(held)).hex()}


def _heard(said: Mapping[str, Any] | None) -> Witness | None:
    if said is None or type(said.get("since")) is not int:
        return None
    return Witness(since=said["since"], digests=strict.octets(said["digests"]))
