"""Detection: which of a rank's tensors have copies on other ranks, found while training goes on.

All ranks look at the same boundaries, the first ones of a term and then ever fewer, tell each other
what they have seen, and agree who writes what from that boundary on. Until then every rank writes
all that it holds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from adacheck_store.config import Settings, node_name
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import part_name
from adacheck_store.format.layout import Layout
from adacheck_store.group import Group
from adacheck_store.redundancy.agreement import Told, agreed, encode_told
from adacheck_store.redundancy.detector import Detector
from adacheck_store.redundancy.exchange import carry
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
from .witness import Witnessing

log = logging.getLogger(__name__)

WRITER_S = 1.0
"""Longest wait, at a look, for the writer's digests of the step before."""

Follow = Callable[[Layout, int, Sharing], None]


class Detection:
    """A rank's part in finding copies; training thread only.

    ``said`` is where it stands, in words.
    """

    def __init__(self, group: Group, settings: Settings) -> None:
        self._group, self._settings = group, settings
        self._why_off = "" if settings.redundancy == "auto" else "off"
        if group.size == 1:
            self._why_off = "one rank alone"
        self.said = self._why_off
        self._vigil = Vigil(group, settings.stall_timeout_s)
        self.begin(settings.start_step, True)

    def begin(self, step: int, foldable: bool) -> None:
        """Every rank writes all that it holds, from this step on: look anew."""
        self._begun = step
        self._on = not self._why_off and foldable
        self._detector = Detector(self._group.rank, self._group.size)
        self._lead = Lead()
        self._updates = 0
        self._sets: dict[Place, str] = {}
        self._anything = False
        self._vigil.rest()
        self._agreed = -1
        self._witnessing: Witnessing | None = None
        if not self._why_off:
            self.said = "nothing has been compared yet" if foldable else "updates are not folded"

    def due(self, step: int) -> bool:
        """Whether all ranks look at a boundary."""
        if not self._on:
            return False
        self._vigil.reached(step)
        made = step - self._begun
        regular = self._compares(made) or self._compares(made + 1)
        return regular or self._vigil.due(step) or self._vigil.due(step + 1)

    def _compares(self, made: int) -> bool:
        """Whether ranks compare after so many boundaries: 2, 4, 8 ..., then as bases come.

        Where nothing is shared there is nothing to watch: then 2, 4, 8 ... for ever. They look
        at the boundary before, too. What is only now and then made equal, as by averaging every few
        steps or by DDP's broadcast of buffers, is not so at two boundaries in a row.
        """
        every = self._settings.base_every
        regular = self._anything and made >= every
        return made > 1 and (made % every == 0 if regular else made & (made - 1) == 0)

    def look(self, step: int, updates: int, whole: Binding, follow: Follow) -> Binding | None:
        """Look at a boundary; what this rank writes from there on, None if that stays as it is.

        ``updates`` were applied so far, ``whole`` is all that the rank holds. ``follow`` is told of
        an assignment that all ranks have agreed on. Where a rank does not answer, or what it says
        makes no sense, everything stays as it is, and nobody looks again.
        """
        rounds = self._detector.look(updates, sightings(whole, self._group.size))
        updated, self._updates = updates > self._updates, updates
        asked = self._compares(step - self._begun) or self._vigil.due(step)
        if rounds is None or not asked:
            return None
        try:
            held = holdings(carry(rounds, self._exchange))
            told = encode_told(
                Told(node=node_name(), updated=updated, held=held, witness=self._witness(step))
            )
            decide = partial(self._lead.decide, step)
            agreement = agreed(self._group.rank, self._group.size, told, decide)
            found = carry(agreement, self._exchange)
            if not found:
                return None
            if found == AS_BEFORE:
                self._agreed = step
                self._watch()
                return None
            sharing = decode_sharing(found)
            parts = [part_name(rank) for rank in range(self._group.size)]
            self._sets = sets_of(sharing.redundancy, parts, self._group.rank)
            self._anything = bool(shared(sharing.redundancy, parts))
            names = [name for _, _, name in self._sets]
            mine = narrowed(whole, sharing.written_by(self._group.rank), names)
            follow(mine.layout, step, sharing)
            self._agreed = step
            self._watch()
        except AdaCheckError as error:
            self._on = False
            self.said = f"{self.said}; copies are not compared any more: {error.message}"
            log.warning("redundancy: at step %d: %s", step, self.said)
            return None
        self.said = str(sharing)
        log.log(logging.WARNING if sharing.diverged else logging.INFO, "redundancy: %s", self.said)
        return mine

    def agreed(self, step: int) -> tuple[Place, ...] | None:
        """What this rank has copies of, where all were found equal at that step; else None."""
        return tuple(self._sets) if step == self._agreed else None

    def captured_by(self, witnessing: Witnessing) -> None:
        """What changes shared states is witnessed there from here on."""
        self._witnessing = witnessing
        self._watch()

    def _watch(self) -> None:
        if self._anything and self._witnessing is not None:
            self._vigil.begin(self._agreed, self._sets, self._witnessing)

    def end(self) -> None:
        """Nobody looks any more."""
        self._vigil.end()

    def _witness(self, step: int) -> Witness | None:
        """What this rank tells of the step before, once its writer has come so far."""
        if self._witnessing is None:
            return None
        return self._witnessing.awaited(step - 1, WRITER_S)

    def _exchange(self, messages: list[bytes]) -> Sequence[bytes]:
        return self._group.exchange(messages, self._settings.stall_timeout_s)


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
