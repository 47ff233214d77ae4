"""Detection: which of a rank's tensors have copies on other ranks, found while training goes on.

All ranks look at the same boundaries, the first ones of a term and then ever fewer, tell each other
what they have seen, and agree who writes what from that boundary on. Until then every rank writes
all that it holds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from adacheck_store.config import Settings, node_name
from adacheck_store.format.errors import AdaCheckError, GroupError
from adacheck_store.format.keys import part_name
from adacheck_store.group import Group
from adacheck_store.redundancy.agreement import Told, agreed, encode_told, name_of
from adacheck_store.redundancy.costs import MOST_RANKS
from adacheck_store.redundancy.detector import Detector, Finding
from adacheck_store.redundancy.exchange import Rounds, carry
from adacheck_store.redundancy.lead import AS_BEFORE, Lead
from adacheck_store.redundancy.shares import Sharing, decode_sharing
from adacheck_store.redundancy.sighting import (
    DIGEST_BYTES,
    Piece,
    Sighting,
    Standing,
    sight,
)
from adacheck_store.redundancy.states import holdings
from adacheck_store.redundancy.witness import Place, Witness, sets_of, shared

from .layouts import Binding, Slot
from .narrow import narrowed
from .shards import is_replicated
from .vigil import Vigil
from .witness import Sets, Witnessing

log = logging.getLogger(__name__)

WRITER_S = 1.0
"""Longest wait, at a look, for the writer's digests of the step before."""

Adopt = Callable[[Binding, int, Sharing, Group], None]
"""Has this rank capture and write by an assignment from a step on: on all ranks of a group, or on
none, where that raises."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """An assignment that all ranks write by: its name (see `name_of`), and of each state that this
    rank shares a name for the ranks it shares it with. ``anything`` is shared by any.
    """

    name: str = ""
    sets: Mapping[Place, str] = field(default_factory=dict)
    anything: bool = False


class Detection:
    """A rank's part in finding copies; training thread only."""

    def __init__(self, group: Group, settings: Settings) -> None:
        self._group, self._settings = group, settings
        self._why_off = "" if settings.redundancy == "auto" else "off"
        if group.size == 1:
            self._why_off = "one rank alone"
        elif group.size > MOST_RANKS:
            self._why_off = self._why_off or f"more than {MOST_RANKS} ranks are not compared"
        self._vigil = Vigil(group, settings.stall_timeout_s, settings.base_every)
        self.begin(settings.start_step, True)

    def begin(self, step: int, foldable: bool) -> None:
        """Every rank writes all that it holds, from this step on: look anew."""
        self._begun = step
        self._on = not self._why_off and foldable
        self._detector = Detector(self._group.rank, self._group.size)
        self._lead = Lead()
        self._updates = 0
        self._looked = -1
        self._by = Agreement()
        self._agreed = -1
        self._failure = ""
        self._witnessing: Witnessing | None = None
        self._vigil.watch(step, None)
        self._found = self._why_off or (
            "nothing has been compared yet" if foldable else "updates are not folded"
        )

    @property
    def said(self) -> str:
        """Where it stands, in words."""
        return f"{self._found}; {self._failure}" if self._failure else self._found

    def due(self, step: int) -> bool:
        """Whether all ranks look at a boundary."""
        if not self._on:
            return False
        self._vigil.reached(step)
        made = step - self._begun
        regular = self._compares(made) or self._compares(made + 1)
        return regular or self._vigil.due(step) or self._vigil.due(step + 1)

    def _compares(self, made: int) -> bool:
        """Whether ranks compare after so many boundaries: 2, 4, 8 ..., and as bases come.

        Where nothing is shared there is nothing to watch: then 2, 4, 8 ... alone. So it is after a
        look that failed, for nobody knows what others have made of it: there all come, whatever
        they know. They look at the boundary before, too. What is only now and then made equal, as
        by averaging every few steps or by DDP's broadcast of buffers, is not so at two boundaries
        in a row.
        """
        watched = self._by.anything and not self._failure
        as_bases_come = watched and made % self._settings.base_every == 0
        return made > 1 and (as_bases_come or made & (made - 1) == 0)

    def look(self, step: int, updates: int, whole: Binding, adopt: Adopt) -> None:
        """Look at a boundary, and ``adopt`` an assignment where all agree on another one.

        ``updates`` were applied so far, ``whole`` is all that the rank holds. Where a rank does not
        answer, or cannot follow, everything stays as it is, and all look again.
        """
        group = self._group.room(f"look/{step}")
        compares = self._compares(step - self._begun) or self._vigil.due(step)
        try:
            rounds = self._detector.look(updates, sightings(whole, self._group.size))
            before, self._looked = self._looked, step
            updated, self._updates = updates > self._updates, updates
            if compares:
                if rounds is None or before != step - 1:
                    raise GroupError("this rank has not looked at the step before")
                self._agree(group, step, updated, rounds, whole, adopt)
        except Exception as error:
            group.leave()
            self._failed(step, error)
        if compares:  # not before: while so many connect, the store may be slow to answer
            self._vigil.begin()

    def _agree(
        self, group: Group, step: int, updated: bool, rounds: Rounds[tuple[Finding, ...]],
        whole: Binding, adopt: Adopt,
    ) -> None:  # fmt: skip
        """Compare with all ranks; they speak in a room of this look, which may fail alone."""
        timeout_s = self._settings.stall_timeout_s

        def exchange(messages: list[bytes]) -> Sequence[bytes]:
            return group.exchange(messages, timeout_s)

        held = holdings(carry(rounds, exchange))
        told = Told(
            node=node_name(), updated=updated, held=held, witness=self._witness(step),
            by=self._by.name,
        )  # fmt: skip
        decide = partial(self._lead.decide, step)
        found = carry(agreed(group.rank, group.size, encode_told(told), decide), exchange)
        if found not in (b"", AS_BEFORE):
            sharing = decode_sharing(found)
            parts = [part_name(rank) for rank in range(group.size)]
            sets = sets_of(sharing.redundancy, parts, group.rank)
            names = [name for _, _, name in sets]
            adopt(narrowed(whole, sharing.written_by(group.rank), names), step, sharing, group)
            self._by = Agreement(name_of(found), sets, bool(shared(sharing.redundancy, parts)))
            self._found = str(sharing)
            level = logging.WARNING if sharing.diverged else logging.INFO
            log.log(level, "redundancy: %s", self._found)
        self._failure = ""
        if found:
            self._agreed = step
        self._vigil.watch(self._agreed, self._witnessing if self._by.sets else None)

    def _failed(self, step: int, error: Exception) -> None:
        """All is as it was; look again, unless a rank is dead."""
        words = error.message if isinstance(error, AdaCheckError) else repr(error)
        self._failure = f"step {step}: copies could not be compared: {words}"
        log.warning("redundancy: %s", self._failure)
        if self._group.lost:
            self._on = False
            self._vigil.end()
        else:
            self._vigil.ask(step)

    def agreed(self, step: int) -> Sets | None:
        """What this rank has copies of, where all were found equal at that step; else None."""
        return self._by.sets if step == self._agreed else None

    def captured_by(self, witnessing: Witnessing) -> None:
        """What changes shared states is witnessed there from here on."""
        self._witnessing = witnessing

    def end(self) -> None:
        """Nobody looks any more."""
        self._vigil.end()

    def _witness(self, step: int) -> Witness | None:
        """What this rank tells of the step before, once its writer has come so far."""
        if self._witnessing is None:
            return None
        return self._witnessing.awaited(step - 1, WRITER_S)


def sightings(whole: Binding, ranks: int) -> Iterator[Sighting]:
    """What a rank sees of its tensors: model and optimizer's, each counter with its moments."""
    for slot in whole.slots:
        standing = _standing(slot, ranks)
        yield _sight(slot, slot.section.main_role, slot.item.local, standing)
        if slot.section.optimizer < 0:
            continue
        state = whole.state(slot)
        counters = repr([_number(state.get(key)) for key in whole.spec(slot).scalars]).encode()
        for role in slot.section.state_roles:
            value = state.get(role)
            if isinstance(value, torch.Tensor):
                seen = _sight(slot, role, value, standing)
                digest = hashlib.blake2b(seen.digest + counters, digest_size=DIGEST_BYTES).digest()
                yield seen if seen.trouble else replace(seen, digest=digest)


def _standing(slot: Slot, ranks: int) -> Standing:
    """A buffer that does not change may do so later, on one rank alone."""
    if is_replicated(slot.item.tensor, ranks):
        return Standing.DECLARED
    frozen = slot.item.parameter and not slot.item.tensor.requires_grad
    return Standing.FROZEN if frozen and slot.section.optimizer < 0 else Standing.TRAINED


def _sight(slot: Slot, role: str, tensor: torch.Tensor, standing: Standing) -> Sighting:
    return sight(
        tensor, name=slot.item.name, role=role, shape=slot.piece.shape,
        piece=Piece(slot.piece.boxes, slot.piece.flat), standing=standing,
    )  # fmt: skip


def _number(value: object) -> float | None:
    """A counter, wherever it lies."""
    return None if value is None else float(value)  # type: ignore[arg-type]
