"""Leaving a run: what is still waited for, and which exception goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from .grace import Grace, Stopped
from .seam import told

log = logging.getLogger(__name__)

EXIT_FLUSH_S = 600.0
"""Longest wait for the tiers when a ``with`` block is left."""

FAILED_FLUSH_S = 30.0
"""The same when it is left by an exception: the near tier alone."""


def leave(
    error: BaseException | None, grace: Grace, flush: Callable[..., None],
    close: Callable[[], None],
) -> None:  # fmt: skip
    """Flush and close; ``error`` is what leaves, if anything does.

    Raises `Stopped` for it where SIGTERM has ended the run.
    """
    left_s = grace.left()
    far = error is None or left_s is not None
    limit_s = EXIT_FLUSH_S if error is None else FAILED_FLUSH_S
    # An error that is leaving already matters more than ours.
    leaving = contextlib.nullcontext if error is None and left_s is None else told
    try:
        with leaving():
            flush(limit_s if left_s is None else left_s, far=far)
    finally:
        with leaving():
            close()
    if left_s is not None and isinstance(error, Exception):
        log.warning("ended by SIGTERM, and by %s: %s", type(error).__name__, error)
        raise Stopped from error
