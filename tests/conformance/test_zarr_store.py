"""zarr's own tests of a store, run over ours; and a base opened through it."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.zarr import ZarrTier
from adacheck_store.tiers.zarr_store import ObjectsStore
from tests.conformance.records import World


class TestObjectsStore(StoreTests[ObjectsStore, cpu.Buffer]):
    """Inherited; only how to get behind the store is ours."""

    store_cls = ObjectsStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        """A store in a fresh folder."""
        return {"objects": LocalObjects(tmp_path)}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> ObjectsStore:
        """An open store."""
        return asyncio.run(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> ObjectsStore:
        """A store not yet open."""
        return self.store_cls(**store_kwargs)

    async def set(self, store: ObjectsStore, key: str, value: Buffer) -> None:
        """Write behind the store."""
        path = Path(store.objects.path) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.to_bytes())

    async def get(self, store: ObjectsStore, key: str) -> Buffer:
        """Read behind the store."""
        return self.buffer_cls.from_bytes((Path(store.objects.path) / key).read_bytes())

    def test_store_repr(self, store: ObjectsStore) -> None:
        """It says where it is."""
        assert repr(store) == f"ObjectsStore({store.objects.path!r})"

    def test_store_supports_writes(self, store: ObjectsStore) -> None:
        """It does."""
        assert store.supports_writes

    def test_store_supports_listing(self, store: ObjectsStore) -> None:
        """It does."""
        assert store.supports_listing


def _in_a_loop(name: str) -> Any:
    inherited = getattr(StoreTests, name)

    def test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(inherited(*args, **kwargs))

    # pytest takes the fixtures and the marks from here.
    test.__signature__ = inspect.signature(inherited)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = name, inherited.__doc__
    test.pytestmark = getattr(inherited, "pytestmark", [])  # type: ignore[attr-defined]
    return test


# zarr's suite is asynchronous, which pytest alone does not run.
for _name in dir(StoreTests):
    if _name.startswith("test_") and inspect.iscoroutinefunction(getattr(StoreTests, _name)):
        setattr(TestObjectsStore, _name, _in_a_loop(_name))


def test_a_base_through_the_store(tmp_path: Path) -> None:
    """zarr reads a base through our object store, wherever that lies."""
    world = World()
    values = np.arange(100_000, dtype=np.float32)
    base = world.base(1, {"layers/param": ("F32", values.tobytes())})
    objects = LocalObjects(tmp_path)
    ZarrTier(objects).put([*world.roots(), base])
    group = zarr.open_group(ObjectsStore(objects, read_only=True), path=base.key, mode="r")
    read = np.asarray(group["layers/param"][:])  # type: ignore[index]
    assert np.array_equal(read.view(np.float32), values)
