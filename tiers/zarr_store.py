"""A zarr ``Store`` over an object store, for those who open a base with zarr itself.

The zarr tier does not need it: it reads and writes chunk objects directly, for speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from adacheck_store.format.errors import RecordNotFoundError

from .objects import Objects


class ObjectsStore(Store):
    """Objects as zarr sees a store. Unlike the zarr tier it takes a missing chunk for zeros."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, objects: Objects, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.objects = objects

    def with_read_only(self, read_only: bool = False) -> ObjectsStore:
        """The same objects, to be written to or not."""
        return type(self)(self.objects, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectsStore) and self.objects.path == other.objects.path

    def __hash__(self) -> int:
        return hash(self.objects.path)

    def __repr__(self) -> str:
        return f"ObjectsStore({self.objects.path!r})"

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Bytes of an object, None if there is none."""
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:  # fmt: skip
        """Bytes of an object, None if there is none."""
        try:
            data = self._get(key, byte_range)
        except RecordNotFoundError:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    def _get(self, key: str, byte_range: ByteRequest | None) -> bytes:
        match byte_range:
            case None:
                return self.objects.get(key)
            case RangeByteRequest(start, end):
                return self.objects.get(key, start, end - start)
            case OffsetByteRequest(offset):
                return self.objects.get(key, offset)
            case SuffixByteRequest(suffix):
                return self.objects.get(key)[-suffix:]
            case _:
                raise ValueError(f"Unexpected byte_range, got {byte_range}.")

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Ranges of several objects."""
        wanted = (self.get(key, prototype, part) for key, part in key_ranges)
        return list(await asyncio.gather(*wanted))

    async def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            await asyncio.to_thread(self.objects.get, key, 0, 0)
        except RecordNotFoundError:
            return False
        return True

    async def set(self, key: str, value: Buffer) -> None:
        """Store an object."""
        await asyncio.to_thread(self._put, key, value, False)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Store an object unless the name is taken."""
        await asyncio.to_thread(self._put, key, value, True)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Store an object."""
        self._put(key, value, if_absent=False)

    def _put(self, key: str, value: Buffer, if_absent: bool) -> None:
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"a value must be a zarr Buffer, not {type(value)}")
        self.objects.put(key, [value.to_bytes()], if_absent)

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await asyncio.to_thread(self.delete_sync, key)

    def delete_sync(self, key: str) -> None:
        """Delete an object."""
        self._check_writable()
        self.objects.delete([key])

    async def list(self) -> AsyncIterator[str]:
        """Names of all objects."""
        for name in await asyncio.to_thread(self._names, ""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Names of the objects that begin with a prefix."""
        for name in await asyncio.to_thread(self._names, prefix):
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names of what lies directly below a prefix."""
        folder = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
        names = await asyncio.to_thread(self._names, folder)
        for name in dict.fromkeys(name[len(folder) :].split("/")[0] for name in names):
            yield name

    def _names(self, prefix: str) -> Any:
        folder = prefix.rpartition("/")[0]
        below = f"{folder}/" if folder else ""
        return [name for name in self.objects.list(below) if name.startswith(prefix)]
