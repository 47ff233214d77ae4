"""Where a test of the seam runs: on a CUDA device, or on a CPU that plays one (`late`)."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import torch

from adacheck_store.trainer_hooks import copies
from adacheck_store.trainer_hooks.checkpointer import Checkpointer
from adacheck_store.trainer_hooks.hooks import StepHooks
from tests.gpu.late import LateDevice, Tape, no_reads

BUSY_CYCLES = 1_000_000_000
"""How long a device is kept busy: half a second or so."""


class Place:
    """A device, and what a test can ask of it."""

    device = torch.device("cpu")
    cuda = False

    def __init__(self, monkeypatch: Any) -> None:
        self._watching = False
        for cls, name in [
            (StepHooks, "_before"), (StepHooks, "_after"), (Checkpointer, "end_step"),
        ]:  # fmt: skip
            monkeypatch.setattr(cls, name, self._strictly(getattr(cls, name)))

    @contextlib.contextmanager
    def strict(self) -> Any:
        """Fail where this thread waits for the device."""
        raise NotImplementedError
        yield

    @contextlib.contextmanager
    def watched(self) -> Any:
        """Within this our hooks and `end_step` are strict."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _strictly(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.strict() if self._watching else contextlib.nullcontext():
                return method(*args, **kwargs)

        return call

    def busy(self) -> None:
        """Give the device work, so that what comes after it is late."""

    def idle(self) -> bool:
        """Whether the device has done all its work."""
        return True

    def stream(self) -> Any:
        """A context on another stream, and one that makes the current stream wait for it."""
        return contextlib.nullcontext()

    def join(self, stream: Any) -> None:
        """Have the current stream wait for another."""

    def record(self, work: Any) -> Any:
        """Record what ``work()`` does into a graph; a function that replays it."""
        raise NotImplementedError


class Cuda(Place):
    """The first CUDA device."""

    cuda = True

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__(monkeypatch)
        self.device = torch.device("cuda", 0)
        torch.cuda.init()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # once, that the detector does not find everything
            torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def strict(self) -> Any:
        """Torch's own detector of synchronisation."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def busy(self) -> None:
        """Sleep on the current stream."""
        torch.cuda._sleep(BUSY_CYCLES)

    def idle(self) -> bool:
        """Ask the current stream."""
        return bool(torch.cuda.current_stream().query())

    def stream(self) -> Any:
        """A side stream that begins where the current one is."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)

    def join(self, stream: Any) -> None:
        """Wait on the device."""
        torch.cuda.current_stream().wait_stream(stream.stream)

    def record(self, work: Any) -> Any:
        """A CUDA graph."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class Late(Place):
    """The CPU, whose copies land late."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__(monkeypatch)
        self.late = LateDevice()
        monkeypatch.setattr(copies, "DEVICE", self.late)

    @contextlib.contextmanager
    def strict(self) -> Any:
        """No reads, and no waiting for a copy."""
        self.late.watched = threading.get_ident()
        try:
            with no_reads():
                yield
        finally:
            self.late.watched = None

    def record(self, work: Any) -> Any:
        """A tape."""
        tape = Tape()
        self.late.tape = tape
        try:
            with tape:
                work()
        finally:
            self.late.tape = None
        return tape.replay
