"""Objects put in parts: several at once, whole or not at all, nothing left behind."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from adacheck_store.format.errors import AdaCheckError, RecordNotFoundError

from .s3_client import S3Client

PART_BYTES = 16 << 20
MULTIPART_BYTES = 32 << 20
_PARTS_MAX = 10_000


def upload(
    s3: S3Client, key: str, views: Sequence[memoryview], metadata: dict[str, str],
    condition: dict[str, str],
) -> bool:  # fmt: skip
    """Put an object in parts; raises `ConflictError` where a condition does not hold.

    False if the upload is gone when it is completed again: an earlier attempt may have completed
    it, its reply lost, which the object itself tells. At most ``parallel`` parts are in memory.
    """
    place = {"Bucket": s3.place.bucket, "Key": key}
    begun = s3.call("multipart", key, lambda client: client.create_multipart_upload(
        **place, Metadata=metadata, ChecksumAlgorithm="CRC32"))  # fmt: skip
    place["UploadId"] = begun["UploadId"]
    total = sum(view.nbytes for view in views)
    size = max(PART_BYTES, -(-total // _PARTS_MAX))
    try:
        with ThreadPoolExecutor(s3.place.parallel, "adacheck-part") as pool:
            numbers = range(1, -(-total // size) + 1)
            parts = list(pool.map(lambda n: _part(s3, place, views, n, size), numbers))
        done = {"Parts": parts}
        s3.call("multipart", key, lambda client: client.complete_multipart_upload(
            **place, MultipartUpload=done, **condition))  # fmt: skip
    except RecordNotFoundError:
        return False
    except BaseException:
        with suppress(AdaCheckError):
            abort(s3, place)
        raise
    return True


def _part(
    s3: S3Client, place: dict[str, str], views: Sequence[memoryview], number: int, size: int
) -> dict[str, Any]:
    body = b"".join(cut(views, (number - 1) * size, number * size))
    crc = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    reply = s3.call(
        "put", place["Key"],
        lambda client: client.upload_part(
            **place, PartNumber=number, Body=body, ChecksumCRC32=crc
        ),
        sent=len(body),
    )  # fmt: skip
    return {"PartNumber": number, "ETag": reply["ETag"], "ChecksumCRC32": crc}


def abort(s3: S3Client, upload: dict[str, str]) -> None:
    """Withdraw an upload; ``upload`` is its bucket, key and number."""
    s3.call("abort", upload["Key"], lambda client: client.abort_multipart_upload(**upload))


def cut(views: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """The pieces of bytes start..stop of some views one after another."""
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, view.nbytes)
        if low < high:
            yield view[low:high]
        at += view.nbytes


def server_time(reply: dict[str, Any]) -> float:
    """When a reply was sent, by the server's clock; without its date nothing is old (0)."""
    date = reply["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    return parsedate_to_datetime(date).timestamp() if date else 0.0


def abandoned(s3: S3Client, age_s: float) -> Iterator[tuple[str, str]]:
    """Key and number of uploads below the prefix, begun that long ago and not ended."""
    given: dict[str, Any] = {
        "Bucket": s3.place.bucket, "Prefix": s3.place.key("") if s3.place.prefix else "",
    }  # fmt: skip
    while True:
        page = s3.call("uploads", given["Prefix"], lambda c: c.list_multipart_uploads(**given))
        for item in page.get("Uploads", ()):
            if server_time(page) - item["Initiated"].timestamp() >= age_s:
                yield item["Key"], item["UploadId"]
        if not page.get("IsTruncated"):
            return
        given["KeyMarker"] = page.get("NextKeyMarker", "")
        given["UploadIdMarker"] = page.get("NextUploadIdMarker", "")
