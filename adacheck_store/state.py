"""A part's whole state at a step, in memory: what a fold ends in and what restore loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adacheck_store.format.bodies import Groups, SectionState
from adacheck_store.format.layout import Layout, Section


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


def gathered(
    states: Mapping[str, PartState], own: str, wanted: Mapping[str, Mapping[tuple[str, str], bool]]
) -> PartState:
    """What a rank held, from the parts that have it, as the state of its ``own`` part.

    ``wanted`` maps parts to scopes and names, and these to whether the optimizer's state comes with
    the parameter; where it does not the parameter is one that no optimizer has. Slices come without
    scope, for they are this rank's to load, and keep their places in the arrays of their part.
    Hyper-parameters are those of the own part.
    """
    sections: list[Section] = []
    arrays: dict[str, torch.Tensor] = {}
    found: dict[str, SectionState] = {}
    for part, state in states.items():
        pairs = ((section, whole) for section in state.layout.sections for whole in (True, False))
        for section, whole in pairs:
            places = [wanted[part].get((piece.scope, piece.name)) for piece in section.slices]
            kept = [index for index, held in enumerate(places) if held is whole]
            if not kept:
                continue
            made = _taken(section, kept, part, whole)
            sections.append(made)
            for role, _ in made.roles:
                array = state.arrays.get(f"{section.name}/{role}")
                if array is not None:
                    arrays[f"{made.name}/{role}"] = array[: made.elements]
            if whole and section.name in state.states:
                found[made.name] = _picked(state.states[section.name], kept)
    mine = states[own]
    layout = replace(mine.layout, sections=tuple(sections))
    return replace(mine, layout=layout, arrays=arrays, states=found)


def _taken(section: Section, kept: Sequence[int], part: str, whole: bool) -> Section:
    """Some slices of a part's section, ``whole`` or as parameters that no optimizer has."""
    slices = tuple(replace(section.slices[index], scope="") for index in kept)
    if whole:
        return replace(section, name=f"{part}.{section.name}", slices=slices)
    bare = tuple(replace(piece, group=-1) for piece in slices)
    return Section(
        name=f"{part}.{section.name}.alone", optimizer=-1, roles=section.roles[:1], slices=bare
    )


def _picked(state: SectionState, kept: Sequence[int]) -> SectionState:
    return replace(
        state, present=tuple(state.present[index] for index in kept),
        scalars={key: tuple(values[i] for i in kept) for key, values in state.scalars.items()},
    )  # fmt: skip
