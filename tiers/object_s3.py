"""Objects in an S3 bucket, or in one that speaks its language, through boto3."""

from __future__ import annotations

import base64
import secrets
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from adacheck_store.format.errors import (
    RecordNotFoundError,
    TierError,
    TierUnavailableError,
    UnsupportedError,
)
from adacheck_store.format.ids import Buffer

from .objects import check_name
from .s3_client import ConflictError, S3Client
from .s3_errors import ShortReadError
from .s3_multipart import MULTIPART_BYTES, abandoned, abort, server_time, upload
from .s3_place import S3Place, parse_s3
from .s3_ranges import Ranges
from .transfer import copy_into

TOKEN = "adacheck-put"
"""Metadata of an object: which call has made it, so that a call whose reply was lost knows."""

_DELETED_AT_ONCE = 1000
_LISTED_AT_ONCE = 1000


class S3Objects:
    """An object store below a prefix of a bucket.

    Every put carries a CRC-32 of what the caller gave, which the server compares; what is read
    whole is compared with it again. A conditional create whose reply was lost, made again, finds
    its own object and has succeeded. An object over 32 MiB is put in parts, which are withdrawn if
    it fails. What is put is durable when the call returns, and seen by all.
    """

    def __init__(self, place: S3Place | str) -> None:
        self.place = parse_s3(place) if isinstance(place, str) else place
        self.path = self.place.name
        self.parallel = self.place.parallel
        self._s3 = S3Client(self.place)
        self._ranges = Ranges(self.place.bucket)
        self._lock = threading.Lock()
        self._swept = False

    def __reduce__(self) -> tuple[type, tuple[S3Place]]:
        return type(self), (self.place,)

    def requests(self) -> Mapping[str, int]:
        """Requests so far by kind, and bytes ``in`` and ``out``."""
        return self._s3.requests()

    # -- writing --

    def put(self, name: str, buffers: Sequence[Buffer], if_absent: bool = False) -> bool:
        """Store an object, whole or not at all; False if ``if_absent`` and the name is taken."""
        check_name(name)
        key = self.place.key(name)
        self._sweep_once()
        if if_absent and self.place.unsafe_no_conditional_writes:
            if self._token(key) is not None:
                return False
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        token = secrets.token_hex(12)
        condition = {"IfNoneMatch": "*"} if if_absent and self._conditions else {}
        try:
            if sum(view.nbytes for view in views) <= MULTIPART_BYTES:
                self._put(key, b"".join(views), token, condition)
                return True
            if upload(self._s3, key, views, {TOKEN: token}, condition):
                return True
        except ConflictError:
            if not condition:
                raise self._untold(name, "a condition that was not set") from None
        # Taken by somebody, or by an earlier attempt of this call, whose reply was lost.
        held = self._token(key)
        if held is None:
            raise self._untold(name, "the server does not say whether the name is taken")
        return held == token

    def _untold(self, name: str, why: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"a put cannot be judged: {why}", path=f"{self.path}/{name}",
            hint="it is tried again; see who else writes there",
        )  # fmt: skip

    @property
    def _conditions(self) -> bool:
        return not self.place.unsafe_no_conditional_writes

    def _put(self, key: str, body: bytes, token: str, condition: dict[str, str]) -> None:
        given = {
            "Bucket": self.place.bucket, "Key": key, "Body": body, "Metadata": {TOKEN: token},
            "ChecksumCRC32": crc32(body), **condition,
        }  # fmt: skip
        self._s3.call("put", key, lambda client: client.put_object(**given), sent=len(body))

    def _head(self, key: str) -> dict[str, Any]:
        given = {"Bucket": self.place.bucket, "Key": key}
        found: dict[str, Any] = self._s3.call("head", key, lambda c: c.head_object(**given))
        return found

    def _token(self, key: str) -> str | None:
        """Which put has made the object that stands there; None if none stands there."""
        try:
            return str(self._head(key).get("Metadata", {}).get(TOKEN, ""))
        except RecordNotFoundError:
            return None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are passed over."""
        batch: list[str] = []
        for name in names:
            check_name(name)
            batch.append(self.place.key(name))
            if len(batch) == _DELETED_AT_ONCE:
                self._delete(batch)
                batch = []
        if batch:
            self._delete(batch)

    def _delete(self, keys: list[str]) -> None:
        objects = [{"Key": key} for key in keys]
        given = {"Bucket": self.place.bucket, "Delete": {"Objects": objects, "Quiet": True}}

        def send(client: Any) -> None:
            for error in client.delete_objects(**given).get("Errors", ()):
                if error.get("Code") != "NoSuchKey":
                    raise client.exceptions.ClientError({"Error": error}, "DeleteObjects")

        self._s3.call("delete", keys[0], send)

    def sync(self) -> None:
        """Return at once: what is put is durable."""

    # -- reading --

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object, fewer where it ends before; raises `RecordNotFoundError`."""
        check_name(name)
        key = self.place.key(name)
        if length == 0:
            self._head(key)
            return b""
        if start or length is not None:
            return self._range(key, start, length)
        given = {"Bucket": self.place.bucket, "Key": key, "ChecksumMode": "ENABLED"}

        def send(client: Any) -> bytes:
            reply = client.get_object(**given)
            data: bytes = reply["Body"].read()
            if len(data) != reply["ContentLength"]:
                raise ShortReadError(f"{len(data)} of {reply['ContentLength']} bytes")
            return data

        return self._s3.call("get", key, send, got=len)

    def _range(self, key: str, start: int, length: int | None) -> bytes:
        def quick(client: Any) -> bytes | None:
            found = self._ranges.get(client, key, _span(start, length))
            if found is None:
                return None
            _check_range(found[1], start, length, len(found[0]))
            return found[0]

        data = self._s3.call("get", key, quick, got=lambda data: len(data or b""))
        return self._range_by_boto3(key, start, length) if data is None else data

    def _range_by_boto3(self, key: str, start: int, length: int | None) -> bytes:
        given = {"Bucket": self.place.bucket, "Key": key, "Range": _span(start, length)}

        def send(client: Any) -> bytes:
            try:
                reply = client.get_object(**given)
            except client.exceptions.ClientError as exc:
                if exc.response.get("Error", {}).get("Code") in ("InvalidRange", "416"):
                    return b""  # it ends before
                raise
            data: bytes = reply["Body"].read()
            _check_range(str(reply.get("ContentRange", "")), start, length, len(data))
            return data

        return self._s3.call("get", key, send, got=len)

    def get_into(self, name: str, start: int, out: memoryview) -> int:
        """Bytes of an object to where they are wanted, fewer where it ends before; how many.

        Raises `RecordNotFoundError`.
        """
        check_name(name)
        key, size = self.place.key(name), len(out)
        if not size:
            return len(self.get(name, start, 0))

        def fill(client: Any) -> int | None:
            found = self._ranges.fill(client, key, _span(start, size), out)
            if found is not None:
                _check_range(found[1], start, size, found[0])
            return None if found is None else found[0]

        count = self._s3.call("get", key, fill, got=_or_none)
        if count is None:
            data = self._range_by_boto3(key, start, size)
            copy_into(out, 0, data)
            count = len(data)
        return count

    def list(self, prefix: str, most: int | None = None) -> Iterator[str]:
        """Names that begin with a prefix (empty, or ending in ``/``), sorted; at most so many.

        S3 sorts by whole keys, not every server that speaks its language does.
        """
        if prefix:
            check_name(prefix.rstrip("/"))
        if most is not None:
            return islice(self._names(prefix, min(most, _LISTED_AT_ONCE)), most)
        return iter(sorted(self._names(prefix, _LISTED_AT_ONCE)))

    def dated(self, prefix: str) -> Iterator[tuple[str, float]]:
        """What `list` gives, each with the server's time (s) at which it was put."""
        if prefix:
            check_name(prefix.rstrip("/"))
        return iter(sorted(self._items(prefix, _LISTED_AT_ONCE)))

    def now(self) -> float:
        """The server's clock: the date of a reply."""
        page = self._page({"Bucket": self.place.bucket, "Prefix": self.place.key(""), "MaxKeys": 1})
        return server_time(page)

    def _names(self, prefix: str, page_size: int) -> Iterator[str]:
        return (name for name, _ in self._items(prefix, page_size))

    def _items(self, prefix: str, page_size: int) -> Iterator[tuple[str, float]]:
        lead = self.place.key("") if self.place.prefix else ""
        given = {"Bucket": self.place.bucket, "Prefix": lead + prefix, "MaxKeys": page_size}
        more: dict[str, str] = {}
        while True:
            page = self._page(given | more)
            for item in page.get("Contents", ()):
                name = item["Key"][len(lead) :]
                if name and not name.endswith("/"):  # a "folder" that some console has made
                    yield name, item["LastModified"].timestamp()
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, given: dict[str, Any]) -> dict[str, Any]:
        page: dict[str, Any] = self._s3.call(
            "list", given["Prefix"], lambda client: client.list_objects_v2(**given)
        )
        return page

    def written_at(self, name: str) -> float:
        """When an object was put, by the server's clock, in whole seconds since 1970."""
        check_name(name)
        return float(self._head(self.place.key(name))["LastModified"].timestamp())

    # -- what the server can do, and what others left --

    def probe(self, name: str) -> None:
        """See that the server heeds conditions, on an object that stands; `UnsupportedError`.

        Where it does not, the object is written again with the bytes it has.
        """
        if self.place.unsafe_no_conditional_writes:
            return
        data = self.get(name)
        try:
            taken = not self.put(name, [data], if_absent=True)
        except TierError as error:
            if "NotImplemented" not in error.message:
                raise
            taken = False
        if not taken:
            raise UnsupportedError(
                "this server has no conditional writes (If-None-Match), by which only one of two "
                "writers gets a run", path=self.path,
                hint="use a server that has them; unsafe_no_conditional_writes=1 in the URL goes "
                "on without, if you see to it that no two writers start at once",
            )  # fmt: skip

    def unfinished(self, age_s: float = 0.0) -> int:
        """How many uploads in parts were begun that long ago below the prefix and not ended."""
        return sum(1 for _ in abandoned(self._s3, age_s))

    def sweep(self, age_s: float = 86_400.0) -> int:
        """Withdraw uploads in parts that are older, by the server's clock; returns how many."""
        count = 0
        for key, number in abandoned(self._s3, age_s):
            with suppress(RecordNotFoundError):
                abort(self._s3, {"Bucket": self.place.bucket, "Key": key, "UploadId": number})
            count += 1
        return count

    def _sweep_once(self) -> None:
        """Once a process; without the permission to look there is nothing to be done."""
        with self._lock:
            if self._swept:
                return
            self._swept = True
        with suppress(TierError):
            self.sweep()


def crc32(data: Buffer) -> str:
    """The checksum of an object as S3 writes it."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _span(start: int, length: int | None) -> str:
    """A range as HTTP writes it."""
    return f"bytes={start}-{'' if length is None else start + length - 1}"


def _check_range(said: str, start: int, length: int | None, got: int) -> None:
    """A server may cut a range short and announce just what it sends."""
    try:
        span, _, total = said.removeprefix("bytes ").partition("/")
        first = int(span.partition("-")[0])
        expected = int(total) - start if length is None else min(length, int(total) - start)
    except ValueError as exc:
        raise ShortReadError(f"a range was asked for, and the reply has none: {said!r}") from exc
    if first != start or got != expected:
        raise ShortReadError(f"{got} bytes from {first}, not {expected} from {start}")


def _or_none(count: int | None) -> int:
    return count or 0
