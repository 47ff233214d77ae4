"""A part's whole state at a step, in memory: what a fold ends in and what restore loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from adacheck_store.format.bodies import Groups, SectionState
from adacheck_store.format.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """State of one part at ``step``.

    ``arrays`` maps ``<section>/<role>`` to a flat CPU tensor of the section's length; a state
    role of which no slice is present may be missing. ``states`` says per section which slices
    have optimizer state, and their counters. ``boundary`` holds the groups' hyper-parameters
    per optimizer as they stood at the boundary.
    """

    part: str
    step: int
    layout: Layout
    layout_id: str
    arrays: Mapping[str, torch.Tensor]
    states: Mapping[str, SectionState]
    boundary: tuple[Groups, ...]
