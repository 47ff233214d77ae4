"""The schedule of captured bases: which boundary brings one, and which gap it closes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from adacheck_store.config import Settings

from .layouts import Binding
from .unfolded import described

log = logging.getLogger(__name__)

Gap = Mapping[str, Any]


class BaseSchedule:
    """What the trainer's side knows of captured bases; training thread only.

    ``kept`` is the last step of which a boundary was handed over, ``exact`` the last one that a
    base gives exactly; ``moved`` says why the next boundary begins another layout, if it does.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._told = False
        self.begin(settings.start_step)

    def begin(self, step: int) -> None:
        """A run begins, or goes on, at a step."""
        self.kept = self._begun = self.exact = step
        self.moved = ""

    @property
    def first(self) -> bool:
        """True until a boundary has been handed over: the time to refuse what cannot be kept."""
        return self.kept == self._begun

    def gap(self, step: int, wanted: Gap | None, binding: Binding) -> Gap | None:
        """What the captured base that comes with a boundary closes; None if none comes instead.

        ``wanted`` is what the writer asks for.
        """
        gap = wanted or self.unfolded(step, binding)
        if not self.moved:
            return gap
        if gap is None:
            return {"reason": self.moved, "from": self.kept + 1}
        return {"reason": f"{gap['reason']}; {self.moved}", "from": gap["from"]}

    def state_touched(self) -> None:
        """Somebody has changed an optimizer's state between two steps: the chain begins anew."""
        self.moved = self.moved or "the optimizer's state was changed between its steps"
        if not self._told:
            self._told = True
            log.warning("%s: the whole state is kept, each time", self.moved)

    def unfolded(self, step: int, binding: Binding, *, now: bool = False) -> Gap | None:
        """Where updates cannot be folded: the gap of the base of which it is time.

        One comes with the first step: whether the state can be kept shows only then.
        """
        due = now or self.first or step % self._settings.full_every == 0
        if binding.foldable or step == self.kept or not due:
            return None
        return {"reason": f"cannot be folded: {described(binding)}", "from": self.kept + 1}

    def besides(self, step: int, bounded: bool) -> bool:
        """Whether a base comes besides the delta: folds drift, and the last one lies far back."""
        return bounded and step - self.exact >= self._settings.bounded_every

    def handed_over(self, step: int) -> None:
        """A boundary goes to the writer."""
        self.kept, self.moved = step, ""
