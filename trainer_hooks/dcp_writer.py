"""torch.distributed.checkpoint writes a step of a run: its `StorageWriter` over a store.

Keys are those that `dcp` reads. What several ranks have is written by one of them, a parameter
together with its optimizer's state; so of torch's plan only what each rank has is taken, and not
whom torch would have write it.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from adacheck_store.foreign import (
    Foreign,
    Found,
    lay_out,
    names_of,
    only,
    refuse_strays,
    spec_for,
    tied,
)
from adacheck_store.foreign_keys import Keys, with_counters
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError, UsageError
from adacheck_store.format.keys import check_run
from adacheck_store.format.layout import whole_box
from adacheck_store.group import Group, share
from adacheck_store.regions import Box
from adacheck_store.saving import Saved, save
from adacheck_store.store import open_for_saving

from .dcp import OTHERS
from .extras import extra_record, freeze
from .ranks import find_group

WHY = "torch.distributed.checkpoint"

HINT = (
    "take both by torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer), whose "
    "names agree; DcpWriter(model=..., optimizer=...) says under which keys they stand"
)


@dataclass(slots=True)
class _Local:
    """What this rank was given: pieces by key, and values that are no tensors."""

    pieces: dict[str, Found] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class DcpWriter(StorageWriter):
    """Writes a step of a run for ``torch.distributed.checkpoint.save(state, storage_writer=...)``.

    The state has what `get_state_dict` of torch gives under the keys ``model`` and ``optimizer``;
    without an optimizer there are steps to load, and none to train on from. What else it has is
    kept for `DcpReader`: tensors of one rank, and what `torch.load` gives with ``weights_only``.
    ``optimizer_class`` (``torch.optim.AdamW``) is found out where its options tell. All ranks of
    torch.distributed, or of ``group``, make one. Use a writer for one save; `async_save` works with
    threads. Afterwards ``saved`` says what was made.

    The step is there when all ranks have written all, and else not. It goes on from the newest
    provable step below it, and ends a training that is attached to the run. Raises `UsageError`,
    `UnsupportedError` naming what cannot be kept, `TierError`; torch wraps them.
    """

    def __init__(
        self, store: str, run: str, step: int, *, cache: str | os.PathLike[str] | None = None,
        model: str = "model", optimizer: str = "optimizer", optimizer_class: str = "",
        group: Group | None = None,
    ) -> None:  # fmt: skip
        self.saved: Saved | None = None
        self._store, self._cache = store, cache
        self._run, self._step = check_run(run), step
        self._keys, self._class = Keys(model, optimizer), optimizer_class
        self._group = find_group() if group is None else group
        self._items: Sequence[WriteItem] = ()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: which step is written was said when the writer was made."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here: a writer is given, not found."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is done when the data comes."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; what it says that this rank has is remembered."""
        if not plan.usable:
            raise UnsupportedError(
                "a plan that was kept from an earlier save", run=self._run,
                hint="give a planner without enable_plan_caching",
            )  # fmt: skip
        self._items = plan.items
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        if len(plans) != self._group.size:
            raise UsageError(
                f"{len(plans)} ranks save, and the writer is of {self._group.size}",
                run=self._run, hint="DcpWriter(group=...) says which ranks save together",
            )  # fmt: skip
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; returns when that of all ranks is there."""
        local = _Local()
        for item in self._items:
            self._take(item, planner, local)
        named = self._foreign(local)
        refuse_strays(
            share(self._group, "names", lambda: names_of(named)), HINT, run=self._run,
            step=self._step,
        )  # fmt: skip
        foreign = self._of_class(named)
        laid = lay_out(only(foreign, self._share(foreign)))
        others = self._others(local)
        store = open_for_saving(self._store, self._cache)
        try:
            self.saved = save(
                store, self._run, self._step, self._group, laid,
                lambda link: extra_record(link, self._step, {OTHERS: others}), WHY,
            )  # fmt: skip
        finally:
            store.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: a step is there by what its records say."""

    def _take(self, item: WriteItem, planner: SavePlanner, local: _Local) -> None:
        key, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            data.seek(0)
            local.values[key] = self._loaded(key, data)
            return
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        sides = zip(chunk.offsets, chunk.sizes, strict=True)
        box: Box = tuple((start, start + size) for start, size in sides)
        tensor = data.detach()
        if not item.tensor_data.size.numel() or tensor.numel():
            found = Found(
                shape=tuple(item.tensor_data.size), boxes=(box,), dtype=tensor.dtype,
                read=lambda: tensor.cpu(),
            )  # fmt: skip
            local.pieces[key] = _joined(key, local.pieces.get(key), found)
            local.plain[key] = tensor

    def _loaded(self, key: str, data: io.BytesIO) -> Any:
        try:
            with torch.serialization.safe_globals([io.BytesIO]):  # ``_extra_state`` of some
                return torch.load(data, weights_only=True)
        except Exception as error:
            raise UnsupportedError(
                f"{key[:200]!r} cannot be kept: {str(error).splitlines()[0][:200]}", run=self._run,
                hint="give plain values: dicts, lists, numbers, strings, tensors",
            ) from error  # fmt: skip

    def _foreign(self, local: _Local) -> Foreign:
        """What is the model's and the optimizer's, as this rank has it."""
        trained = [
            name for group in self._keys.groups(local.pieces, local.values)
            for name in group["params"]
        ]  # fmt: skip
        model = {name: local.plain[key] for key, name in self._keys.named(local.pieces).items()}
        return self._keys.foreign(local.pieces, local.values, self._class, tied(model, trained))

    def _of_class(self, foreign: Foreign) -> Foreign:
        """The state with its optimizer's class: as those ranks see it that have some of it."""
        spec = spec_for(foreign)
        told = share(
            self._group, "optimizer", lambda: [bool(foreign.states), spec.name if spec else ""]
        )
        names = [name for has, name in told if has] or [told[0][1]]
        return with_counters(replace(foreign, optimizer=names[0]))

    def _share(self, foreign: Foreign) -> list[str]:
        """Names of what this rank writes: each piece is one rank's, that which has least so far."""
        mine: list[list[Any]] = [
            [name, [list(map(list, box)) for box in found.boxes], found.nbytes,
             sorted(foreign.states.get(name, {}))]
            for name, found in foreign.model.items()
        ]  # fmt: skip
        told = share(self._group, "pieces", lambda: mine)
        holders: dict[str, list[tuple[int, int, list[str]]]] = defaultdict(list)
        for rank, rows in enumerate(told):
            for name, boxes, size, roles in rows:
                holders[f"{name} {boxes}"].append((rank, size * (1 + len(roles)), roles))
        load = [0] * self._group.size
        writers: dict[str, int] = {}
        for piece, found in holders.items():
            most = max((roles for _, _, roles in found), key=len)
            able = [(load[rank], rank, size) for rank, size, roles in found if roles == most]
            if any(not set(roles) <= set(most) for _, _, roles in found):
                raise ModelMismatchError(
                    f"ranks have other optimizer state of {piece.split(' ')[0]!r}", run=self._run,
                    hint="all ranks that have a parameter have to have its state, or none of it",
                )  # fmt: skip
            _, rank, size = min(able)
            load[rank] += size
            writers[piece] = rank
        return [row[0] for row in mine if writers[f"{row[0]} {row[1]}"] == self._group.rank]

    def _others(self, local: _Local) -> dict[str, Any]:
        """What is neither model's nor optimizer's, where this rank is the first to have it."""
        found: dict[str, Any] = {}
        for key, piece in local.pieces.items():
            if not self._keys.owner(key):
                if piece.boxes != (whole_box(piece.shape),):
                    raise UnsupportedError(
                        f"{key!r} is sharded, and neither the model's nor the optimizer's",
                        run=self._run, hint="save it as the model of another run",
                    )  # fmt: skip
                found[key] = freeze(local.plain[key], key)
        for key, value in local.values.items():
            if not self._keys.owner(key, value=True):
                found[key] = freeze(value, key)
        told = share(self._group, "others", lambda: sorted(found))
        before = {key for keys in told[: self._group.rank] for key in keys}
        return {key: value for key, value in found.items() if key not in before}


def _joined(key: str, one: Found | None, other: Found) -> Found:
    """Two pieces of one tensor on a rank as one."""
    if one is None:
        return other
    pairs: list[tuple[Box, Callable[[], torch.Tensor]]] = [
        (each.boxes[0], each.read) for each in (one, other)
    ]
    if len(one.boxes) > 1:
        raise UnsupportedError(f"{key!r} has more than two pieces on one rank")
    pairs.sort(key=lambda pair: pair[0])
    return replace(
        one, boxes=tuple(box for box, _ in pairs),
        read=lambda: torch.cat([read().reshape(-1) for _, read in pairs]),
    )  # fmt: skip
