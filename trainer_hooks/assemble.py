"""Assembling boundaries: the buffers, watches and encoder of a begun run, and their hand-over."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adacheck_store.boundary import Link
from adacheck_store.config import Settings
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.record import Record
from adacheck_store.optimizers import flushes_denormals

from .blocks import BlockWatch
from .capture_base import boundary_groups, existing_arrays, fill_area, section_states
from .deepspeed import partitions
from .encode import ClosedBoundary, Encoder
from .extras import freeze
from .held import typed_groups
from .layouts import Binding
from .loader import LoaderPosition
from .narrow import capture_alike
from .outside import OutsideWatch, SetCopy
from .stager import HostBuffer, Stager, StateArea
from .tracked import Tracked
from .unfolded import state_trees
from .updates import CapturedUpdate

log = logging.getLogger(__name__)


class StartBoundary(ClosedBoundary):
    """The boundary a run begins with; its state is copied only if its base is asked for."""

    def base_of(self, link: Link) -> Record:
        """A captured base of the live state, which has not been trained on yet."""
        if self.area is None:
            self.area = self.encoder.new_area()
        found = self.base(link)
        assert found is not None
        return found


class Assembly:
    """Everything that captures a begun run; training thread only, `release` excepted.

    ``whole`` is the binding of all that the rank holds, of which ``binding`` is what it keeps.
    """

    def __init__(self, binding: Binding, settings: Settings, whole: Binding | None = None) -> None:
        self.binding, self.whole = binding, whole or binding
        self._settings = settings
        self._kept_here = frozenset(binding.slots)
        self._blocks = BlockWatch(binding)
        self.stager = Stager(
            binding, policy=settings.policy, window=settings.window,
            block_bytes=self._blocks.area_bytes, timeout_s=settings.stall_timeout_s,
        )  # fmt: skip
        self.watch = OutsideWatch(binding, self.whole)
        self.stager.release_area(self.stager.area())  # page faults belong here, not in a step
        self.encoder = Encoder(binding, self._blocks, self._filled_area)

    def narrowed(self, binding: Binding) -> Assembly:
        """One of that binding, a part of this one's; itself where that is no other.

        What is free of this one's memory is given back before: there need not be room for both.
        """
        if capture_alike(binding, self.binding):
            return self
        self.stager.drop()
        return Assembly(binding, self._settings, self.whole)

    def _filled_area(self) -> StateArea:
        area = self.stager.area()
        fill_area(self.binding, area)
        return area

    def _kept(self, staged: Sequence[SetCopy]) -> tuple[list[SetCopy], list[SetCopy]]:
        """Copies of what is kept here, and of what is kept elsewhere."""
        apart = [item for item in staged if item.slot not in self._kept_here]
        return [item for item in staged if item.slot in self._kept_here], apart

    def _release(self, buffer: HostBuffer | None, area: StateArea | None) -> None:
        if buffer is not None:
            self.stager.release(buffer)
        if area is not None:
            self.stager.release_area(area)

    def names_of(self, indices: Sequence[int]) -> bool | list[str]:
        """Names of slots that optimizers were given, whoever keeps them; True for all of them."""
        given = self.binding.given
        return len(indices) == len(given) or [given[i].item.name for i in indices]

    def start_boundary(self, step: int, extras: Mapping[str, Any]) -> StartBoundary:
        """The boundary before the first update: everything as it stands is known from here on."""
        buffer = self.stager.acquire()
        copies, _ = self._kept(self.watch.stage(buffer))
        groups, states = boundary_groups(self.binding), section_states(self.binding)
        buffer.landed()
        buffer.settle()
        self.watch.rebase()
        self.encoder.stored.rebase(copies)
        self.encoder.arithmetic([typed_groups(held) for held in groups])
        return StartBoundary(
            step=step, encoder=self.encoder, buffer=buffer, area=None, updates=(), copies=copies,
            groups=groups, arrays=existing_arrays(self.binding),
            states=states, extras=extras, on_release=self._release, start=True,
        )  # fmt: skip

    def boundary(
        self, step: int, buffer: HostBuffer, updates: Sequence[CapturedUpdate],
        extras: Mapping[str, Any], gap: Mapping[str, Any] | None, *, based: bool = False,
    ) -> ClosedBoundary:  # fmt: skip
        """Close a boundary: copy what the encoder will read, and read what is small.

        A captured base comes instead of the delta where there is a gap, and besides if ``based``.
        """
        area = None
        try:
            staged = self.watch.stage(buffer)  # first: it says by name what has changed its shape
            copies, apart = self._kept(staged)
            captured = based or gap is not None
            if captured or step % self._settings.base_every == 0:
                area = self.stager.area()
                fill_area(self.binding, area)
            else:
                self._blocks.stage(step, buffer)
            closed = ClosedBoundary(
                step=step, encoder=self.encoder, buffer=buffer, area=area, updates=updates,
                copies=copies, groups=boundary_groups(self.binding),
                arrays=existing_arrays(self.binding),
                states=section_states(self.binding) if captured else {},
                extras=extras, on_release=self._release, gap=gap, based=based,
                flushes=flushes_denormals(), apart=apart,
            )  # fmt: skip
            buffer.landed()
            self.encoder.witness.coming(step, closed.witness)
            return closed
        except BaseException:
            self._release(buffer, area)
            raise

    def moment(self, step: int, extras: Mapping[str, Any]) -> ClosedBoundary:
        """A boundary without an update or a base: what `again` and `live.Live` need of it."""
        copies, apart = self._kept(self.watch.stage(None))
        return ClosedBoundary(
            step=step, encoder=self.encoder, buffer=None, area=None, updates=(),
            copies=copies, groups=boundary_groups(self.binding), arrays=[], states={},
            extras=extras, on_release=self._release, apart=apart,
        )  # fmt: skip

    def again(self, last: ClosedBoundary, gap: Mapping[str, Any]) -> ClosedBoundary | None:
        """The last boundary with a captured base, where no update was made since; waits for copies.

        What a forward, or the loop, may have changed meanwhile is as the boundary has it. None
        where that cannot be.
        """
        if last.encoder is not self.encoder or self.watch.changed():
            log.warning("step %d is not kept: tensors have been changed since", last.step)
            return None
        if self.encoder.witness.unknown(last.step):
            log.warning(
                "step %d is kept, but is not restored: whether its copies are equal to those on "
                "other ranks is not known until all have looked again", last.step,
            )  # fmt: skip
        extras = {**last.extras, **state_trees(self.binding)}
        states, area = section_states(self.binding), self._filled_area()
        area.settle()  # and so have all copies before
        copies = [replace(item, data=item.data.clone()) for item in last.copies]
        for item in copies:
            area.views[item.key].copy_(item.data)
        return ClosedBoundary(
            step=last.step, encoder=self.encoder, buffer=None, area=area, updates=(),
            copies=copies, groups=last.groups, arrays=existing_arrays(self.binding),
            states=states, extras=extras, on_release=self._release, gap=gap,
        )  # fmt: skip

    def failed(self, step: int, error: AdaCheckError | None) -> ClosedBoundary:
        """A boundary whose update was not captured: the writer opens a gap for it."""
        failure = error or AdaCheckError("an update was not captured")
        closed = ClosedBoundary(
            step=step, encoder=self.encoder, buffer=None, area=None, updates=(), copies=[],
            groups=(), arrays=[], states={}, extras={}, on_release=self._release, failure=failure,
        )  # fmt: skip
        self.encoder.witness.coming(step, closed.witness)
        return closed


def gather_extras(
    assembly: Assembly, tracked: Tracked, loader: LoaderPosition, carried: Any,
    left: tuple[Sequence[int], Mapping[int, Any]] | None,
) -> dict[str, Any]:  # fmt: skip
    """What an extra keeps; ``left`` is what `Capture.left_behind` gives, None before capture."""
    trees = tracked.trees()
    trees["loader"] = freeze(loader.tree(), "loader")
    trees |= partitions(assembly.binding.optimizers)
    if carried is not None:
        trees["carried"] = carried
    if left is not None:
        zeroed, grads = left
        trees["held"] = assembly.names_of(zeroed)
        named = assembly.binding.given
        if grads:
            trees["grads"] = {named[i].item.name: grad for i, grad in grads.items()}
    return trees
