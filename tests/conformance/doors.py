"""Back doors: each reads and writes what a tier keeps, without the tier's own code."""

import dataclasses
import hashlib
import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
import zarr

from adacheck_store.format.head import SealedHead
from adacheck_store.format.record import Record, decode_record
from adacheck_store.tiers.memory import MemoryTier
from adacheck_store.tiers.shared import PAGE, SharedTier
from tests.conformance.records import MIB


class Door(Protocol):
    """A back door; the tier is closed meanwhile, where it persists."""

    def load(self, key: str) -> dict[str, bytes]:
        """The three strings and the arrays of a record."""

    def store(self, key: str, record: Record) -> None:
        """Write a record."""

    def damage(self, key: str, array: str, how: str) -> None:
        """``flip`` a bit of block 0, ``shorten`` the piece that holds it, or ``lose`` that."""

    def damage_head(self, key: str) -> None:
        """Flip a bit of a head."""

    def leftovers(self) -> list[str]:
        """What no record owns."""


class MemoryDoor:
    """Into the dictionary."""

    def __init__(self, tier: MemoryTier) -> None:
        self.tier = tier

    def load(self, key: str) -> dict[str, bytes]:
        sealed, blocks = self.tier._records[key]
        found = {"adacheck": sealed.raw, "id": sealed.id.encode()}
        for (array, _), data in sorted(blocks.items()):
            found[array] = found.get(array, b"") + data
        return found

    def store(self, key: str, record: Record) -> None:
        blocks = {(block.array, block.index): bytes(block.data) for block in record.blocks()}
        self.tier._records[key] = (record.sealed, blocks)

    def damage(self, key: str, array: str, how: str) -> None:
        blocks = self.tier._records[key][1]
        blocks[array, 0] = bend(blocks[array, 0], how)
        if how == "lose":
            del blocks[array, 0]

    def damage_head(self, key: str) -> None:
        del self.tier._records[key]

    def leftovers(self) -> list[str]:
        return []


class SharedDoor(MemoryDoor):
    """Into the dictionary, and the file that it points into."""

    tier: SharedTier

    def load(self, key: str) -> dict[str, bytes]:
        sealed, blocks = self.tier._records[key]
        found = {"adacheck": sealed.raw, "id": sealed.id.encode()}
        for (array, _), kept in sorted(blocks.items()):
            found[array] = found.get(array, b"") + self._bytes(kept)
        return found

    def _bytes(self, kept: Any) -> bytes:
        return kept if isinstance(kept, bytes) else os.pread(self._file(), kept.size, kept.at)

    def _file(self) -> int:
        return self.tier._store.fd

    def damage(self, key: str, array: str, how: str) -> None:
        blocks = self.tier._records[key][1]
        kept: Any = blocks[array, 0]
        if isinstance(kept, bytes):
            super().damage(key, array, how)
        elif how == "lose":
            del blocks[array, 0]
        elif how == "flip":
            os.pwrite(self._file(), bend(self._bytes(kept), how), kept.at)
        else:
            blocks[array, 0] = dataclasses.replace(kept, size=kept.size - 1)

    def leftovers(self) -> list[str]:
        held = sum(
            -(-kept.size // PAGE)
            for _, blocks in self.tier._records.values()
            for kept in blocks.values()
            if not isinstance(kept, bytes)
        )
        pages = os.fstat(self._file()).st_blocks * 512 // PAGE
        return [f"{pages} pages for {held}"] if pages != held + 1 else []


def bend(data: bytes, how: str) -> bytes:
    """Flip a bit, or lose the last byte."""
    return data[:-1] if how == "shorten" else bytes([data[0] ^ 1]) + data[1:]


class LmdbDoor:
    """Into the environment, by the table in `lmdb_entries`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self.path), map_size=1 << 32)

    @staticmethod
    def _page(prefix: bytes, array: str, page: int) -> bytes:
        name = hashlib.blake2b(array.encode(), digest_size=8).digest()
        return b"p" + prefix + name + struct.pack(">I", page)

    def load(self, key: str) -> dict[str, bytes]:
        with self._open() as env, env.begin() as txn:
            value = txn.get(b"h" + key.encode())
            header = value[8:]
            length = struct.unpack("<Q", header[:8])[0]
            entries = json.loads(header[8 : 8 + length])
            meta = entries.pop("__metadata__")
            found = {"adacheck": meta["adacheck"].encode(), "id": meta["id"].encode()}
            body = b""
            for array in entries:
                pages = []
                while (page := txn.get(self._page(value[:8], array, len(pages)))) is not None:
                    pages.append(page)
                found[array] = b"".join(pages)
                body += found[array]
            decode_record(header + body)
            return found

    def store(self, key: str, record: Record) -> None:
        prefix = struct.pack(">Q", 2**40)
        with self._open() as env, env.begin(write=True) as txn:
            for array, data in record.arrays.items():
                for page in range(-(-len(data) // (4 * MIB))):
                    part = data[page * 4 * MIB : (page + 1) * 4 * MIB]
                    txn.put(self._page(prefix, array, page), part)
            txn.put(b"h" + key.encode(), prefix + bytes(record.buffers()[0]))

    def damage(self, key: str, array: str, how: str) -> None:
        with self._open() as env, env.begin(write=True) as txn:
            name = self._page(txn.get(b"h" + key.encode())[:8], array, 0)
            if how == "lose":
                txn.delete(name)
            else:
                txn.put(name, bend(txn.get(name), how))

    def damage_head(self, key: str) -> None:
        with self._open() as env, env.begin(write=True) as txn:
            value = txn.get(b"h" + key.encode())
            at = value.index(b'\\"kind\\"') + 3
            txn.put(b"h" + key.encode(), value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])

    def leftovers(self) -> list[str]:
        with self._open() as env, env.begin() as txn:
            keys = dict(iter(txn.cursor()))
        owners = {value[:8] for key, value in keys.items() if key[:1] == b"h"}
        return [key.hex() for key in keys if key[:1] == b"p" and key[1:9] not in owners]


class ZarrDoor:
    """Into the folder, by plain zarr for groups and by plain JSON for packs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _pack(self, key: str) -> tuple[Path, dict[str, object]] | None:
        place, kind, _ = key.rsplit("/", 2)
        if kind in ("delta", "extra"):
            for document in sorted((self.path / place / "pack").glob("*/zarr.json")):
                attributes = json.loads(document.read_text())["attributes"]
                for item in attributes["records"]:
                    if item["key"] == key:
                        return document.parent, item
        return None

    def load(self, key: str) -> dict[str, bytes]:
        pack = self._pack(key)
        if pack is None:
            group = zarr.open_group(self.path / key, mode="r")
            found = {name: str(group.attrs[name]).encode() for name in ("adacheck", "id")}
            for info in json.loads(found["adacheck"])["arrays"]:
                array = group[info["name"]]
                assert array.attrs["dtype"] == info["dtype"]
                found[info["name"]] = np.asarray(array[:]).tobytes()
            return found
        data = np.asarray(zarr.open_group(pack[0], mode="r")["data"][:]).tobytes()
        found = {name: str(pack[1][name]).encode() for name in ("adacheck", "id")}
        sealed = SealedHead.open(found["adacheck"], str(pack[1]["id"]))
        at = int(str(pack[1]["offset"]))
        for info in sealed.head.arrays:
            found[info.name] = data[at : at + info.nbytes]
            at += info.nbytes
        return found

    def store(self, key: str, record: Record) -> None:
        strings = {
            "adacheck": record.sealed.raw.decode(),
            "id": record.sealed.id,
            "info": record.sealed.info,
        }
        place, kind, name = key.rsplit("/", 2)
        if kind not in ("delta", "extra"):
            group = zarr.create_group(self.path / key)
            chunks = {}
            for array, view in record.arrays.items():
                data = np.frombuffer(view, np.uint8)
                chunk = min(len(data), 2 * MIB)
                group.create_array(array, data=data, chunks=(max(1, chunk),), compressors=None)
                chunks[array] = chunk
            group.attrs.update({**strings, "chunk_bytes": chunks})
            return
        data = np.frombuffer(b"".join(record.buffers()[1:]), np.uint8)
        group = zarr.create_group(self.path / place / "pack" / f"{name}-{name}-{'ab' * 8}")
        chunk = min(len(data), MIB)
        group.create_array("data", data=data, chunks=(max(1, chunk),), compressors=None)
        item = {"key": key, **strings, "offset": 0}
        group.attrs.update(
            {"adacheck_pack": 1, "nbytes": len(data), "chunk_bytes": chunk, "records": [item]}
        )

    def damage(self, key: str, array: str, how: str) -> None:
        pack = self._pack(key)
        file = self.path / key / array / "c" / "0" if pack is None else pack[0] / "data" / "c" / "0"
        if how == "lose":
            file.unlink()
        elif how == "flip":
            file.write_bytes(bend(file.read_bytes(), how))
        else:
            file.write_bytes(file.read_bytes()[:500])

    def damage_head(self, key: str) -> None:
        pack = self._pack(key)
        file = (self.path / key if pack is None else pack[0]) / "zarr.json"
        text = file.read_text()
        file.write_text(text.replace('\\"kind\\"', '\\"kinb\\"', 1))

    def leftovers(self) -> list[str]:
        found = []
        for file in self.path.rglob("*"):
            owned = file.is_dir() or file.name == "zarr.json"
            with suppress(ValueError):
                parts = file.relative_to(self.path).parts
                owned = owned or any(
                    "records" in text or "adacheck" in text
                    for depth in range(1, len(parts))
                    if (document := self.path.joinpath(*parts[:depth], "zarr.json")).exists()
                    for text in [document.read_text()]
                )
            if not owned:
                found.append(str(file))
        return found
