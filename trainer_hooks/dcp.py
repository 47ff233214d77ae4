"""torch.distributed.checkpoint reads any step of a run: its `StorageReader` over a store.

Keys are ``model.<name>``, ``optimizer.state.<name>.<role>`` and ``optimizer.param_groups``, as
`torch.distributed.checkpoint.state_dict` has them. Each rank reads the blocks that have something
of its shards, verified and folded. Claims nothing, changes no store.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from adacheck_store.arrays import from_typed, torch_dtype
from adacheck_store.candidates import carry_out
from adacheck_store.fetch import Fetcher
from adacheck_store.fold import Fold
from adacheck_store.foreign_keys import GROUPS, under
from adacheck_store.format.errors import OrderError, RestoreError
from adacheck_store.format.layout import Layout, Section, Slice
from adacheck_store.group import Group
from adacheck_store.reading import open_fold, open_layouts, read_extra
from adacheck_store.recovery import RestorePlan
from adacheck_store.regions import Box, regions_of
from adacheck_store.reshard import names_of
from adacheck_store.state import PartState
from adacheck_store.store import open_for_reading
from adacheck_store.topology import Need, put_together

from .extras import thaw
from .ranks import find_group

OTHERS = "dcp"
"""Name in an extra of what a save had besides model and optimizer: by key (see `dcp_writer`)."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the chain: a slice of it, its section, and which state it has."""

    piece: Slice
    section: Section
    present: bool
    counters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A step: its plan, the layouts of its parts, and what is known of it from heads alone.

    ``values`` are, by key, what is small: parameter groups, and what else a save has kept.
    """

    plan: RestorePlan
    layouts: Mapping[str, Layout]
    tensors: Mapping[str, _Tensor]
    values: Mapping[str, Any]


class DcpReader(StorageReader):
    """Reads a step of a run for ``torch.distributed.checkpoint.load(state, storage_reader=...)``.

    The newest provable step, or ``step``: the same on all ranks of torch.distributed, or of
    ``group``. ``model`` and ``optimizer`` are the keys in the state under which the two are; the
    state has what `get_state_dict` of torch gives, or a part of that; of a step that `DcpWriter`
    made also what else was saved. After a load ``step`` says which one it was. Of what else a
    training keeps (generators, loader, schedulers) nothing is read.

    Raises `RestoreError` and `NotProvableError` as a restore does; a block that no tier has right
    is an error too: then name an older step. Use one reader for one load.
    """

    def __init__(
        self, store: str, run: str, step: int | None = None, *,
        cache: str | os.PathLike[str] | None = None, model: str = "model",
        optimizer: str = "optimizer", group: Group | None = None,
    ) -> None:  # fmt: skip
        self.step = step
        self._run, self._model, self._optimizer = run, model, optimizer
        self._store = open_for_reading(store, cache)
        self._group = find_group() if group is None else group
        self._opened: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: which step is read was said when the reader was made."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here: a reader is given, not found."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is to read; every rank calls it."""
        done = carry_out(self._store.tiers, self._run, self._open, step=self.step,
                         group=self._group)  # fmt: skip
        self._opened, self.step = done.result, done.plan.step
        found: dict[str, Any] = {
            key: _metadata(value.dtype, value.shape) if isinstance(value, torch.Tensor)
            else BytesStorageMetadata()
            for key, value in self._opened.values.items()
        }  # fmt: skip
        for name, tensor in self._opened.tensors.items():
            for key, role in self._keys(name, tensor).items():
                counter = role in tensor.counters
                dtype = tensor.counters[role].dtype if counter else None
                dtype = dtype or torch_dtype(tensor.section.dtypes[role])
                size = torch.Size(() if counter else tensor.piece.shape)
                found[key] = _metadata(dtype, size)
        return Metadata(state_dict_metadata=found)

    def _open(self, fetcher: Fetcher, plan: RestorePlan) -> _Opened:
        """Heads alone are read: folds without elements tell the counters."""
        layouts = open_layouts(self._store.tiers, plan)
        tensors: dict[str, _Tensor] = {}
        groups: list[dict[str, Any]] = []
        for part in plan.parts:
            layout = layouts[part.part]
            fold = open_fold(fetcher, layout, part)
            report = fold.run(_Nothing(), only={section.name: () for section in layout.sections})
            if len(layout.optimizers) > 1:
                raise RestoreError(
                    "a run of several optimizers cannot be read as one state of DCP", run=self._run,
                    hint="restore it, or export it by adacheck-store export",
                )  # fmt: skip
            groups = groups or [from_typed(dict(g)) for each in report.boundary for g in each]
            for section in layout.sections:
                for index, piece in enumerate(section.slices):
                    before = tensors.get(piece.name)
                    if before is None or before.section.optimizer < section.optimizer:
                        tensors[piece.name] = _tensor(fold, section, index)
        for number, values in enumerate(groups):
            values["params"] = [
                name for name, each in tensors.items()
                if each.section.optimizer >= 0 and each.piece.group == number
            ]  # fmt: skip
        values = _others(fetcher, plan) | self._group_values(groups)
        return _Opened(plan, layouts, tensors, values)

    def _group_values(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Parameter groups by key: torch asks for each of their numbers, before 2.4 for all."""
        key = under(self._optimizer) + GROUPS
        return {key: groups} | {
            f"{key}.{number}.{name}": value
            for number, group in enumerate(groups) for name, value in group.items()
        }  # fmt: skip

    def _keys(self, name: str, tensor: _Tensor) -> dict[str, str]:
        """Key in the state -> role or counter."""
        main = tensor.section.main_role
        keys = {under(self._model) + each: main for each in names_of(tensor.piece)}
        state = (*tensor.section.state_roles, *tensor.counters) if tensor.present else ()
        return keys | {under(self._optimizer, "state", name) + role: role for role in state}

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: `read_metadata` has found all there is."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fold what this rank's shards need, and copy it to where the planner wants it."""
        if self._opened is None:
            raise OrderError("read_metadata() comes first", run=self._run)
        keys = {
            key: (name, role)
            for name, tensor in self._opened.tensors.items()
            for key, role in self._keys(name, tensor).items()
        }
        tensors = []
        for item in plan.items:
            if item.storage_index.fqn in self._opened.values:
                _give(item, planner, self._opened.values[item.storage_index.fqn])
            else:
                tensors.append(item)
        boxes: dict[str, set[Box]] = defaultdict(set)
        stateful = set[str]()
        for item in tensors:
            name, role = keys[item.storage_index.fqn]
            section = self._opened.tensors[name].section
            if role in section.dtypes and 0 not in item.lengths:
                boxes[name].add(_box(item))
                if role != section.main_role:
                    stateful.add(name)
        state, cut = self._read(boxes, stateful)
        for item in tensors:
            name, role = keys[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            if role in self._opened.tensors[name].counters:
                target.copy_(self._opened.tensors[name].counters[role])
            elif 0 not in item.lengths:
                made, places = cut[name]
                region = places[_box(item)]
                array = state.arrays[f"{made}/{role}"]
                target.copy_(array.as_strided(region.sizes, region.strides, region.base))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, boxes: Mapping[str, set[Box]], stateful: set[str]
    ) -> tuple[PartState, dict[str, tuple[str, dict[Box, Any]]]]:
        """The state of these boxes, and of each tensor its section and where its boxes lie."""
        assert self._opened is not None
        slices = tuple(
            replace(self._opened.tensors[name].piece, boxes=tuple(sorted(wanted)), flat=None,
                    scope="", offset=0)
            for name, wanted in boxes.items()
        )  # fmt: skip
        section = Section(name="need", optimizer=0, roles=(("param", "F32"),), slices=slices)
        need = Need(
            rank=self._group.rank, ranks=self._group.size,
            layout=Layout(optimizers=("",), sections=(section,)),
            bare=frozenset(boxes.keys() - stateful),
        )  # fmt: skip
        fetcher = Fetcher(self._store.tiers)
        made = put_together(fetcher, self._opened.plan, self._opened.layouts, need, {}).state
        cut = {
            piece.name: (each.name, _regions(piece))
            for each in made.layout.sections for piece in each.slices
        }  # fmt: skip
        return made, cut


def _metadata(dtype: torch.dtype, size: Sequence[int]) -> TensorStorageMetadata:
    """A whole tensor, in one chunk."""
    sizes = torch.Size(size)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(sizes)), sizes=sizes)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=sizes, chunks=[chunk]
    )


def _give(item: ReadItem, planner: LoadPlanner, value: Any) -> None:
    """Hand a small value over, as the planner takes it."""
    if item.type == LoadItemType.BYTE_IO:
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)
        return
    target = planner.resolve_tensor(item).detach()
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        value = value.narrow(dim, start, size)
    target.copy_(value)
    planner.commit_tensor(item, target)


def _others(fetcher: Fetcher, plan: RestorePlan) -> dict[str, Any]:
    """What a save had besides model and optimizer, from all ranks; of a training's step nothing."""
    found: dict[str, Any] = {}
    for refs in plan.extras.values() if "saved" in plan.manifest.settings else ():
        found |= thaw(read_extra(fetcher, refs).get(OTHERS, {}))
    return found


class _Nothing:
    """A sink of folds without elements."""

    def window(self, section: Section, role: str, start: int, stop: int) -> torch.Tensor:
        """Room for none."""
        return torch.empty(0, dtype=torch_dtype(section.dtypes[role]))

    def done(self, section: Section, start: int, stop: int, views: Mapping[str, Any]) -> None:
        """Nothing has come."""


def _tensor(fold: Fold, section: Section, index: int) -> _Tensor:
    state = fold.report.states[section.name]
    counters = {
        name: torch.as_tensor(from_typed(values[index]))
        for name, values in state.scalars.items() if values[index] is not None
    }  # fmt: skip
    present = state.present[index] and section.optimizer >= 0
    return _Tensor(section.slices[index], section, present, counters if present else {})


def _box(item: ReadItem) -> Box:
    """What an item wants of its tensor: the storage has it in one chunk."""
    sides = zip(item.storage_offsets, item.lengths, strict=True)
    return tuple((start, start + size) for start, size in sides)


def _regions(piece: Slice) -> dict[Box, Any]:
    """Where each box of a slice lies."""
    found, offset = {}, piece.offset
    for box in piece.boxes:
        alone = replace(piece, boxes=(box,), offset=offset)
        offset += alone.elements
        for region in regions_of(alone):
            found[region.box] = region
    return found
