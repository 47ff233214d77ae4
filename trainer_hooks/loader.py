"""The position in a data loader: what it takes to draw the same next batch again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from adacheck_store.format.errors import ModelMismatchError

from .rng import rng_state, set_rng_state


class LoaderPosition:
    """The pass a run is in: generators as they stood before it, and batches taken since.

    A pass that comes to its end leaves no position. The next pass of a restored run goes on
    where the recorded one stood: the generators are set to the pass's start, the iterator is
    made, what was consumed is skipped (by the loader's own state where it keeps one), and the
    boundary's generators are set, before a batch is drawn.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._start: dict[str, Any] | None = None
        self._consumed = 0
        self._pending: Mapping[str, Any] | None = None
        self._pending_rng: Mapping[str, Any] | None = None

    def restored(self, position: Mapping[str, Any] | None, rng: Mapping[str, Any] | None) -> None:
        """The next pass goes on from this position, then with these generators.

        None: with the generators as they stand when its first batch is asked for. So it must be
        where a step comes before that, with a batch that was fetched ahead.
        """
        self._pending, self._pending_rng = position, rng

    def tree(self) -> dict[str, Any] | None:
        """The position now, None between passes."""
        if self._pending is not None:
            return dict(self._pending)
        if self._start is None:
            return None
        state = None
        if _keeps_state(self._loader):
            state = copy.deepcopy(self._loader.state_dict())
        return {
            "start": self._start, "consumed": self._consumed, "state": state,
            "generators": _generators(self._loader),
        }  # fmt: skip

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One pass over the loader, from the restored position on if there is one."""
        position, rng = self._pending, self._pending_rng
        self._pending = self._pending_rng = None
        self._loader = loader
        if position is None:
            self._start = {"rng": rng_state(), "generators": _generators(loader)}
            self._consumed = 0
            iterator = iter(loader)
        else:
            rng = rng or rng_state()
            iterator = self._resume(loader, position)
            set_rng_state(rng)
        try:
            for batch in iterator:
                self._consumed += 1
                yield batch
        finally:
            # A pass given up halfway is over as well: the next one starts afresh.
            if self._loader is loader:
                self._start = self._loader = None

    def _resume(self, loader: Iterable[Any], position: Mapping[str, Any]) -> Iterator[Any]:
        start: dict[str, Any] = dict(position["start"])
        self._start, self._consumed = start, int(position["consumed"])
        _set_generators(loader, start["generators"])
        set_rng_state(start["rng"])
        if position["state"] is not None:
            if not _keeps_state(loader):
                raise ModelMismatchError(
                    "the run's loader kept its own state, this one does not",
                    hint="give batches() the loader it was given before",
                )
            loader.load_state_dict(position["state"])  # type: ignore[attr-defined]
            iterator = iter(loader)
        else:
            iterator = iter(loader)
            for number in range(self._consumed):
                try:
                    next(iterator)
                except StopIteration:
                    raise ModelMismatchError(
                        f"the loader ends after {number} batches, {self._consumed} were consumed",
                        hint="give batches() the loader it was given before",
                    ) from None
        _set_generators(loader, position["generators"])
        return iterator


def _keeps_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def _owned_generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader and its samplers draw from, by where they stand."""
    found: dict[str, torch.Generator] = {}
    places = {"loader": loader, "sampler": getattr(loader, "sampler", None)}
    batch_sampler = getattr(loader, "batch_sampler", None)
    places["batch_sampler"] = batch_sampler
    places["batch_sampler.sampler"] = getattr(batch_sampler, "sampler", None)
    for name, place in places.items():
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator) and all(
            generator is not known for known in found.values()
        ):
            found[name] = generator
    return found


def _generators(loader: Any) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _owned_generators(loader).items()}


def _set_generators(loader: Any, states: Mapping[str, torch.Tensor]) -> None:
    owned = _owned_generators(loader)
    for name, state in states.items():
        if name in owned:
            owned[name].set_state(state)
