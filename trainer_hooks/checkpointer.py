"""The checkpointer: what a training loop holds; it turns updates into boundaries."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from adacheck_store.config import Settings
from adacheck_store.format.errors import AdaCheckError, OrderError, TermError, TierError, UsageError
from adacheck_store.group import SOLO, Group, together
from adacheck_store.redundancy.shares import Sharing

from .adopt import bare_of, fit
from .assemble import Assembly, StartBoundary, gather_extras
from .capture import Capture
from .detection import Detection
from .encode import ClosedBoundary
from .extras import freeze, thaw
from .grace import Grace
from .hooks import attached
from .layouts import Binding, Optimizers, bind, listed
from .leaving import EXIT_FLUSH_S, leave
from .live import Live
from .load import load
from .loader import LoaderPosition
from .names import Model
from .outside import say_edited
from .rng import set_rng_state
from .rounds import Rounds
from .schedule import BaseSchedule
from .seam import RestoreReport, Session
from .shards import is_sharded
from .tracked import Tracked
from .unfolded import state_trees, warn

log = logging.getLogger(__name__)


class Checkpointer:
    """A run's hold on a model and its optimizers; all calls are the training thread's.

    With one process, one optimizer and no call of `track` every applied ``optimizer.step()`` is a
    boundary. Otherwise `end_step` is, and updating on and on without it is an error. Errors
    of saving do not come out of these calls, unless strict; misuse and the loss of the run to a
    newer writer do.
    """

    def __init__(
        self, model: Model, optimizer: Optimizers, session: Session,
        settings: Settings, names: Mapping[str, torch.Tensor] | None = None, group: Group = SOLO,
    ) -> None:  # fmt: skip
        self._optimizers = listed(optimizer)
        self._model, self._names, self._group = model, names, group
        if any(attached(item) for item in self._optimizers):
            raise OrderError("this optimizer is attached already", hint="close the other one first")
        warn(self._bind(), settings.full_every)
        self._session, self._settings = session, settings
        # Several ranks count steps alike, whatever a scaler skips on one of them.
        self._tracked = Tracked(model, self._optimizers, explicit=group.size > 1)
        self._loader = LoaderPosition()
        self._assembly: Assembly | None = None
        self._step = settings.start_step
        self._rounds = Rounds(len(self._optimizers))
        self._bases = BaseSchedule(settings)
        self._detection = Detection(group, settings)
        self._grace = Grace(settings.sigterm_grace_s, group, session.hurry)
        self._carried: Any = None
        self._failure: AdaCheckError | None = None
        self._last: ClosedBoundary | None = None
        self._restoring = self._loading = self._warned = self._edits_told = self._unbound = False
        self._open = True
        self._capture = Capture(self._optimizers, settings.policy, self)

    @property
    def step(self) -> int:
        """The last boundary's step."""
        return self._step

    def track(self, **objects: Any) -> None:
        """Keep further objects by name, through their ``state_dict``; `end_step` is required then.

        Schedulers, a gradient scaler, or whatever else a step depends on. A call without any
        object makes `end_step` the boundary too: for loops that change weights after the
        optimizer's step. Raises `UnsupportedError` naming what of their state cannot be kept.
        None is ignored.
        """
        self._must_be_open()
        if self._assembly is not None:
            raise OrderError("track() after training has begun", hint="call it before restore()")
        self._tracked.add(objects)

    def restore(self, step: int | None = None) -> RestoreReport:
        """Load the newest provable step (or ``step``); on a fresh run, begin one.

        Model, optimizer, tracked objects and generators are as they were at that step. Nothing
        is touched if the state cannot be proven or is another model's.
        """
        self._must_be_open()
        if self._assembly is not None or self._loading:
            raise OrderError("restore() was called already, or training has begun")
        self._session.together("restore", self._tracked.check_scheduler)
        need = self._session.together("restore", self._bind)
        self._restoring = True
        restored = self._session.restore(step=step, layout=need.layout, bare=bare_of(need))
        self._loading = True  # up to here another step may be asked for
        if restored is None:
            self._begin(self._settings.start_step)
            return RestoreReport(step=self._step)
        state, tree, binding, matches = self._session.together(
            "load", lambda: fit(restored, self._tracked, self._bind())
        )
        load(state, tree, binding, matches)
        self._tracked.load(tree)
        self._carried = tree.get("carried")
        self._begin(restored.step)
        if restored.certificate.exactness == "exact":
            self._bases.exact = restored.certificate.base_step
        if (rng := tree.get("rng")) is not None:
            set_rng_state(rng)
        self._loader.restored(tree.get("loader"), rng if self._carried is None else None)
        return RestoreReport.of(restored, thaw(self._carried))

    def _bind(self) -> Binding:
        return bind(self._model, self._optimizers, self._names, self._group)

    def _begin(self, step: int) -> None:
        def prepared() -> tuple[Assembly, StartBoundary]:
            assembly = Assembly(self._bind(), self._settings)
            extras = self._extras(assembly) | state_trees(assembly.binding)
            return assembly, assembly.start_boundary(step, extras)

        assembly, boundary = self._session.together("buffers", prepared)
        try:
            self._session.start(
                assembly.binding.layout, start_step=step, base=boundary.base_of,
                extra=boundary.extra,
            )  # fmt: skip
        finally:
            boundary.release()
        self._step, self._last = step, boundary
        self._bases.begin(step)
        self._grace.begin(step)
        self._capture_by(assembly, step)

    def _capture_by(self, assembly: Assembly, step: int) -> None:
        """Capture all that is here from a boundary on: who else keeps it is to be found out."""
        self._detection.begin(step, assembly.whole.foldable)
        self._capture_part(assembly)

    def _capture_part(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._capture.begin(assembly.binding, assembly.stager, assembly.watch)
        self._detection.captured_by(assembly.encoder.witness)

    def _adopt(self, found: Binding, step: int, sharing: Sharing, group: Group) -> None:
        """Of copies on other ranks keep what is this rank's to keep: on all ranks, or on none."""
        assert self._assembly is not None
        assembly, limit_s = self._assembly, self._settings.stall_timeout_s
        made = together(group, "buffers", lambda: assembly.narrowed(found), timeout_s=limit_s)
        self._session.follow(found.layout, step, sharing, group)
        if made is not assembly:
            self._capture_part(made)
            self._bases.moved = "copies on other ranks were found"

    @property
    def explicit(self) -> bool:
        """Whether `end_step` is the boundary; else every applied update is."""
        return self._tracked.explicit

    def before_update(self, optimizer: int) -> None:
        """Hook: an update is about to be applied."""
        self._tracked.note_scaler(optimizer)
        if self._assembly is None:
            if self._restoring:
                raise OrderError(
                    "restore() did not succeed, so nothing may be trained into this run",
                    hint="close, and attach again (to another run, for a fresh start)",
                )
            self._tracked.check_scheduler()
            self._begin(self._settings.start_step)
        else:
            self._rounds.check(optimizer, self._step)
        self._follow_layout(optimizer)

    def edited_late(self, name: str) -> None:
        """Hook: an edit made after ``optimizer.step()`` is not in its boundary; said once."""
        if name and not self._tracked.explicit and not self._edits_told:
            self._edits_told = True
            say_edited(name, self._step)

    def after_update(self, optimizer: int) -> None:
        """Hook: an update was applied."""
        self._rounds.note(optimizer)
        if not self._tracked.explicit:
            self._close_boundary()
            self._grace.reached(self._step)

    def _follow_layout(self, optimizer: int) -> None:
        """Where parameters were added, replaced or regrouped, capture by a new layout.

        The boundary to come then brings a captured base, with which the chain starts anew.
        """
        assert self._assembly is not None
        why = self._capture.changes(optimizer)
        if not why:
            return
        try:
            new = self._bind()
        except UsageError as error:
            self._refuse(error)
            self._unbound = True
            return
        if new.same(self._assembly.whole):
            self._capture.accept()
            return
        self._capture_by(Assembly(new, self._settings), self._step + 1)
        self._bases.moved = why

    def _refuse(self, error: Exception) -> None:
        """What cannot be kept is refused at the first boundary; later, training goes on."""
        if isinstance(error, UsageError) and self._bases.first:
            raise error
        self.capture_failed(error)

    def capture_failed(self, error: Exception) -> None:
        """Hook: an update could not be captured; the next boundary says so to the writer."""
        if not isinstance(error, AdaCheckError):
            log.warning("capture failed after step %d", self._step, exc_info=error)
            error = TierError(f"capture failed: {type(error).__name__}: {error}")
        self._failure = self._failure or error
        if not self._warned:
            self._warned = True
            log.warning("not kept after step %d: %s", self._bases.kept, error)

    def end_step(self) -> int:
        """Close the boundary where that is this call's part; returns the step.

        Raises `Stopped`, once all is handed over, where a run that got SIGTERM stops.
        """
        self._must_be_open()
        if self._assembly is None:
            self.before_update(0)
        if self._tracked.explicit:
            self._close_boundary()
            self._grace.reached(self._step)
        return self._step

    def _close_boundary(self) -> None:
        assert self._assembly is not None
        self._session.check()
        self._step += 1
        self._rounds.close()
        due, edited, boundary, self._last = True, False, None, None
        try:
            if self._unbound or self._step % self._settings.base_every == 0:
                self._look_for_tensors()
            if self._bases.moved:
                self._session.follow(self._assembly.binding.layout, self._step)
            elif self._detection.due(self._step):
                whole = self._assembly.whole
                self._detection.look(self._step, self._rounds.total, whole, self._adopt)
            if edited := self._assembly.watch.state_touched():
                self._bases.state_touched()
            gap = self._bases.gap(self._step, self._session.wants_base(), self._assembly.binding)
            due = gap is not None or self._assembly.binding.foldable
            if gap is not None or (due and self._failure is None):
                boundary = self._boundary(gap)
        except (OrderError, TermError):
            raise
        except Exception as error:
            self._refuse(error)
        self._last = boundary or self._moment(self._assembly)
        if not due:
            return
        if boundary is None:
            boundary = self._assembly.failed(self._step, self._failure)
        boundary.agreed, boundary.edited = self._detection.agreed(self._step), edited
        self._failure = None
        self._bases.handed_over(self._step)
        self._session.append(boundary)

    def _look_for_tensors(self) -> None:
        """Parameters and buffers that no optimizer has may have come or gone."""
        assert self._assembly is not None
        self._unbound = True  # with what cannot be bound no base would be whole
        binding = self._bind()
        self._unbound = False
        if not binding.alike(self._assembly.whole):
            self._capture_by(Assembly(binding, self._settings), self._step)
            self._bases.moved = self._bases.moved or "the model's tensors have changed"

    def _boundary(self, gap: Mapping[str, Any] | None) -> ClosedBoundary:
        assert self._assembly is not None
        extras = self._extras(self._assembly) | state_trees(self._assembly.binding)
        buffer, updates = self._capture.take()
        based = gap is None and self._bases.besides(self._step, self._assembly.encoder.bounded)
        closed = self._assembly.boundary(self._step, buffer, updates, extras, gap, based=based)
        if based or gap is not None:
            self._bases.exact = self._step
        return closed

    def _moment(self, assembly: Assembly) -> ClosedBoundary | None:
        """A boundary that is not handed over, for a base that a flush may ask for."""
        self._capture.drop()
        with contextlib.suppress(Exception):  # said when a boundary fails by it
            return assembly.moment(self._step, self._extras(assembly))
        return None

    def _extras(self, assembly: Assembly) -> dict[str, Any]:
        left = None if self._assembly is None else self._capture.left_behind()
        return gather_extras(assembly, self._tracked, self._loader, self._carried, left)

    def carry(self, value: Any) -> Any:
        """Keep a batch that was fetched before its step with the boundaries to come; returns it.

        For loops that fetch ahead: `restore` hands the value of its boundary back as
        ``report.carried``, with tensors on the CPU. Each call replaces the value before it.
        """
        self._must_be_open()
        self._carried = freeze(value, "carry")
        return value

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One pass over a loader; after `restore` it goes on where the step left it."""
        self._must_be_open()
        return self._loader.batches(loader)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, **options: Any
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_`, noting the coefficient: gradients stay half size."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options)
        if not is_sharded(norm):  # else to learn the coefficient would take a collective
            coefficient = torch.clamp(float(max_norm) / (norm.detach() + 1e-6), max=1.0)
            self._capture.observe_scale(coefficient)
        return norm

    def flush(self, timeout_s: float | None = EXIT_FLUSH_S, *, far: bool = True) -> None:
        """Wait until every boundary is synced in the near tier and, if ``far``, drained.

        Raises what keeps it from happening; when the time runs out, what is not saved.
        """
        if self._assembly is not None:
            self._session.flush(timeout_s, far=far, settled=self._close_gap)

    def _close_gap(self) -> None:
        """Keep the last boundary, not what came since, by a base if it is not kept otherwise."""
        assert self._assembly is not None
        if self._rounds.open or self._unbound or self._capture.replayed():
            return
        unfolded = self._bases.unfolded(self._step, self._assembly.binding, now=True)
        gap = self._session.wants_base(now=True) or unfolded
        if gap is not None and (again := self._last and self._assembly.again(self._last, gap)):
            self._bases.kept = self._bases.exact = self._step
            self._session.append(again)

    def live(self) -> Live | None:
        """A copy of the last boundary's state, for `attach`'s ``live``; None if it is gone."""
        gone = self._unbound or self._rounds.begun or self._capture.replayed()
        return None if gone else Live.of(self._session, self._group, self._assembly, self._last)

    def status(self) -> Any:
        """Where the writer stands; raises `OrderError` before the first update or `restore`."""
        if self._assembly is None:
            raise OrderError("the run has not begun", hint="call restore() first")
        return replace(self._session.status(), redundancy=self._detection.said)

    def close(self) -> None:
        """Remove the hooks and stop; what was handed over is stored, not drained."""
        if self._open:
            self._open = False
            self._capture.detach()
            self._detection.end()
            self._session.close(self._grace.to_close())
            self._grace.end()

    def _must_be_open(self) -> None:
        if not self._open:
            raise OrderError("this checkpointer is closed", hint="attach again")

    def __enter__(self) -> Checkpointer:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Flush, on an exception without waiting for the far tier, and close.

        After SIGTERM both are done within the grace, and what leaves is `Stopped`.
        """
        leave(error, self._grace, self.flush, self.close)
