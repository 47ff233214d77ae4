"""Tiers around tiers: faults, slowness and statistics, each with the tier's own interface."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from adacheck_store.format.head import SealedHead
from adacheck_store.format.record import Block

from .base import Source, Tier, TierTraits
from .intake import sizes_of


class WrapperTier(Tier):
    """A tier that hands every call on; the root of the wrappers."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def traits(self) -> TierTraits:  # type: ignore[override]
        """The inner tier's."""
        return self.inner.traits

    def put(self, sources: Sequence[Source]) -> None:
        """Hand on."""
        self.inner.put(sources)

    def head(self, key: str) -> SealedHead:
        """Hand on."""
        return self.inner.head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Hand on."""
        return self.inner.read(key, array, first, count)

    def list(self, prefix: str) -> Iterator[str]:
        """Hand on."""
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Hand on."""
        self.inner.delete(keys)

    def sync(self) -> None:
        """Hand on."""
        self.inner.sync()

    def requests(self) -> Mapping[str, int]:
        """Hand on."""
        return self.inner.requests()

    def close(self) -> None:
        """Hand on."""
        self.inner.close()


Fault = BaseException | Callable[[bytes], bytes]
"""What a scripted call does: raise, or change the bytes it reads."""


def shorten(data: bytes) -> bytes:
    """A fault that loses the last byte of a read."""
    return data[:-1]


def flip(bit: int) -> Callable[[bytes], bytes]:
    """A fault that flips one bit of a read."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
        return bytes(changed)

    return change


class FaultyTier(WrapperTier):
    """A tier whose calls go wrong by a script: method name -> what the next calls do.

    A None in a script lets that call pass; after the script's end all calls do.
    """

    def __init__(self, inner: Tier, script: dict[str, Sequence[Fault | None]]) -> None:
        super().__init__(inner)
        self._script = {name: [*faults] for name, faults in script.items()}
        self._lock = threading.Lock()

    def _next(self, method: str) -> Callable[[bytes], bytes] | None:
        with self._lock:
            faults = self._script.get(method)
            fault = faults.pop(0) if faults else None
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def put(self, sources: Sequence[Source]) -> None:
        """Fail by the script, else hand on."""
        self._next("put")
        super().put(sources)

    def head(self, key: str) -> SealedHead:
        """Fail by the script, else hand on."""
        self._next("head")
        return super().head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Fail or change the bytes by the script, else hand on."""
        change = self._next("read")
        data = super().read(key, array, first, count)
        return change(bytes(data)) if change else data

    def list(self, prefix: str) -> Iterator[str]:
        """Fail by the script, else hand on."""
        self._next("list")
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Fail by the script, else hand on."""
        self._next("delete")
        super().delete(keys)

    def sync(self) -> None:
        """Fail by the script, else hand on."""
        self._next("sync")
        super().sync()


class SlowTier(WrapperTier):
    """A tier behind a slow line: ``delay_s`` a call, and ``bytes_per_s`` for what is read."""

    def __init__(self, inner: Tier, delay_s: float, bytes_per_s: float = float("inf")) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s

    def put(self, sources: Sequence[Source]) -> None:
        """Wait, then hand on."""
        time.sleep(self._delay_s)
        super().put(sources)

    def head(self, key: str) -> SealedHead:
        """Wait, then hand on."""
        time.sleep(self._delay_s)
        return super().head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Hand on, then wait by size."""
        data = super().read(key, array, first, count)
        time.sleep(self._delay_s + len(data) / self._bytes_per_s)
        return data

    def list(self, prefix: str) -> Iterator[str]:
        """Wait, then hand on."""
        time.sleep(self._delay_s)
        return super().list(prefix)

    def sync(self) -> None:
        """Wait, then hand on."""
        time.sleep(self._delay_s)
        super().sync()


class _CountedSource:
    """A source whose blocks are counted on their way."""

    def __init__(self, source: Source, count: Callable[[int], None]) -> None:
        self._source = source
        self._count = count
        self.key = source.key
        self.expected_id = source.expected_id

    @property
    def sizes(self) -> dict[str, int] | None:
        """Bytes of each array, where known."""
        return sizes_of(self._source)

    def blocks(self) -> Iterator[Block]:
        """The blocks."""
        for block in self._source.blocks():
            self._count(block.data.nbytes)
            yield block

    def seal(self) -> SealedHead:
        """The head."""
        return self._source.seal()


class CountingTier(WrapperTier):
    """A tier that counts: calls by method in ``calls``, and bytes ``put`` and ``read``."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.put_bytes = 0
        self.read_bytes = 0
        self._lock = threading.Lock()

    def _call(self, method: str) -> None:
        with self._lock:
            self.calls[method] += 1

    def _count_put(self, size: int) -> None:
        with self._lock:
            self.put_bytes += size

    def put(self, sources: Sequence[Source]) -> None:
        """Count and hand on."""
        self._call("put")
        super().put([_CountedSource(source, self._count_put) for source in sources])

    def head(self, key: str) -> SealedHead:
        """Count and hand on."""
        self._call("head")
        return super().head(key)

    def read(self, key: str, array: str, first: int, count: int) -> bytes | memoryview:
        """Count and hand on."""
        self._call("read")
        data = super().read(key, array, first, count)
        with self._lock:
            self.read_bytes += len(data)
        return data

    def list(self, prefix: str) -> Iterator[str]:
        """Count and hand on."""
        self._call("list")
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Count and hand on."""
        self._call("delete")
        super().delete(keys)

    def sync(self) -> None:
        """Count and hand on."""
        self._call("sync")
        super().sync()
