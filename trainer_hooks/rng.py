"""States of the random number generators as typed values, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from adacheck_store.format.errors import MalformedError, UnsupportedError


def rng_state() -> dict[str, Any]:
    """Python's, numpy's, torch's and every used CUDA device's generator."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": _words(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": _numpy_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = {
            str(index): torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    return found


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put generators back; those that the state does not name are left alone."""
    try:
        python = state["python"]
        words = tuple(int(word) for word in python["words"].tolist())
        random.setstate((python["version"], words, python["gauss"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            _set_numpy_state(state["numpy"])
        cuda = state.get("cuda") or {}
        if torch.cuda.is_available():
            for index, value in cuda.items():
                if int(index) < torch.cuda.device_count():
                    torch.cuda.set_rng_state(value, int(index))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise MalformedError(f"not the state of the generators: {exc!r}"[:300], rule="rng") from exc


def _words(words: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32))


def _numpy_state() -> dict[str, Any]:
    state: tuple[Any, ...] = tuple(np.random.get_state())
    name, keys, position, has_gauss, gauss = state
    if name != "MT19937":
        raise UnsupportedError(
            f"numpy's global generator is {name}", hint="use np.random.Generator objects instead"
        )
    return {
        "words": torch.from_numpy(keys.copy()), "position": int(position),
        "has_gauss": int(has_gauss), "gauss": float(gauss),
    }  # fmt: skip


def _set_numpy_state(state: Mapping[str, Any]) -> None:
    keys = state["words"].numpy()
    np.random.set_state(("MT19937", keys, state["position"], state["has_gauss"], state["gauss"]))
