"""Ranges of objects in S3, by a URL that is signed once for each object.

boto3 takes one to two milliseconds of processor time for a call, as long as the bytes of a range
do, and a restore makes thousands. The range is no part of what is signed, so one signed URL does
for all of an object, through the client's own connections. All that goes wrong is left to boto3.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from http.client import HTTPException, HTTPResponse
from typing import Any

from .s3_errors import ShortReadError
from .transfer import copy_into

_VALID_S = 3600
_SIGNED_MAX = 4096


class Ranges:
    """Signed URLs of one bucket, the last ones used; thread-safe."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._signed: OrderedDict[str, tuple[Any, str, float]] = OrderedDict()

    def get(self, client: Any, key: str, span: str) -> tuple[bytes, str] | None:
        """Bytes of a range as HTTP writes it, and the reply's ``Content-Range``.

        None where the reply is no range, or the client has no connections to lend: it is to be
        asked itself. Raises what boto3 raises of connections, and `ShortReadError`.
        """
        reply = self._ask(client, key, span)
        if reply is None:
            return None
        data: bytes = reply.raw.read()
        _check_length(reply, len(data))
        return data, str(reply.headers.get("Content-Range", ""))

    def fill(self, client: Any, key: str, span: str, out: memoryview) -> tuple[int, str] | None:
        """The same into memory that has room for it, and how many bytes came."""
        reply = self._ask(client, key, span)
        if reply is None:
            return None
        count = _fill(reply.raw, out)
        _check_length(reply, count)
        return count, str(reply.headers.get("Content-Range", ""))

    def _ask(self, client: Any, key: str, span: str) -> Any:
        """The reply with its body still to come, if it is a range."""
        session = self._connections(client)
        if session is None:
            return None
        from botocore.awsrequest import AWSPreparedRequest, HeadersDict

        headers = HeadersDict({"Range": span, "Accept-Encoding": "identity"})
        request = AWSPreparedRequest("GET", self._url(client, key), headers, None, True)
        reply = session.send(request)
        if reply.status_code != 206:
            reply.raw.close()
            with self._lock:
                self._signed.pop(key, None)
            return None
        return reply

    @staticmethod
    def _connections(client: Any) -> Any:
        """The client's own, with its certificates and proxies; boto3 does not promise them."""
        return getattr(getattr(client, "_endpoint", None), "http_session", None)

    def _url(self, client: Any, key: str) -> str:
        with self._lock:
            kept = self._signed.get(key)
            if kept is not None and kept[0] is client and time.monotonic() < kept[2]:
                self._signed.move_to_end(key)
                return kept[1]
        until = time.monotonic() + _VALID_S / 2
        url: str = client.generate_presigned_url(
            "get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=_VALID_S
        )
        with self._lock:
            self._signed[key] = (client, url, until)
            while len(self._signed) > _SIGNED_MAX:
                self._signed.popitem(last=False)
        return url


def _check_length(reply: Any, count: int) -> None:
    announced = int(reply.headers.get("Content-Length", count))
    if count != announced:
        raise ShortReadError(f"{count} bytes of {announced}")


def _fill(raw: Any, out: memoryview) -> int:
    """Read a reply's body to where it is wanted; returns how many bytes came."""
    plain = getattr(raw, "_fp", None)  # urllib3 itself makes an object as long as the body
    if not isinstance(plain, HTTPResponse):
        data = raw.read(len(out))
        copy_into(out, 0, data)
        return len(data)
    count = 0
    try:
        while count < len(out) and (got := plain.readinto(out[count:])):
            count += got
    except HTTPException as exc:  # which urllib3 would have translated
        raise ShortReadError(f"{count} bytes: {exc!r}") from exc
    finally:
        if plain.isclosed() and count:  # read to its end: the connection serves on
            raw.release_conn()
        else:
            raw.close()
    return count
