"""Ranges of objects in S3, signed by boto3's signer and sent over its connections.

boto3 takes one to two milliseconds of processor time for a call, as long as the bytes of a range
do, and a restore makes a thousand. Where its own URL of an object shows that plain signatures do,
all that differs from one range to the next is put together here. What goes wrong is left to boto3.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import parse_qs, quote

from .s3_errors import ShortReadError
from .transfer import copy_into

_SERVICE, _VERSION = "s3", "s3v4"
_PLAIN = {"Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature",
          "Security-Token"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Way:
    """How a client names objects of its bucket: by URLs that begin so, signed for a region.

    ``plain``: whether a signature by the client's credentials is all that is wanted.
    """

    client: Any
    start: str
    region: str
    plain: bool


class Ranges:
    """Reads ranges of one bucket's objects; thread-safe."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._known: _Way | None = None

    def get(self, client: Any, key: str, span: str) -> tuple[bytes, str] | None:
        """Bytes of a range as HTTP writes it, and the reply's ``Content-Range``.

        None where the reply is no range, or the client lends no connections and signer: it is to
        be asked itself. Raises what boto3 raises of connections, and `ShortReadError`.
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
        session, signer = self._lent(client)
        way = self._way(client) if session is not None and signer is not None else None
        if way is None or not way.plain:
            return None
        from botocore.awsrequest import AWSRequest

        url = way.start + quote(key, safe="/~")
        request = AWSRequest("GET", url, headers={"Range": span}, stream_output=True)
        signer.get_auth_instance(_SERVICE, way.region, _VERSION).add_auth(request)
        request.headers["Accept-Encoding"] = "identity"  # not signed: proxies may change it
        reply = session.send(request.prepare())
        if reply.status_code != 206:
            reply.raw.close()
            return None
        return reply

    @staticmethod
    def _lent(client: Any) -> tuple[Any, Any]:
        """The client's connections, with its certificates and proxies, and what signs with its
        credentials, renewed where they are; boto3 does not promise them."""
        endpoint = getattr(client, "_endpoint", None)
        return getattr(endpoint, "http_session", None), getattr(client, "_request_signer", None)

    def _way(self, client: Any) -> _Way:
        with self._lock:
            if self._known is not None and self._known.client is client:
                return self._known
        url: str = client.generate_presigned_url(
            "get_object", Params={"Bucket": self._bucket, "Key": "key"}
        )
        found = _way_of(client, url)
        with self._lock:
            self._known = found
        return found


def _way_of(client: Any, url: str) -> _Way:
    """What a URL of the object ``key``, signed by boto3, shows of all others.

    Not plain is what is signed otherwise, for another service, or with more than a signature.
    """
    path, _, query = url.partition("?")
    said = {name.removeprefix("X-Amz-"): values[0] for name, values in parse_qs(query).items()}
    scope = said.get("Credential", "").split("/")
    plain = (
        path.endswith("/key") and said.keys() <= _PLAIN and len(scope) == 5
        and said.get("Algorithm") == "AWS4-HMAC-SHA256" and scope[3:] == [_SERVICE, "aws4_request"]
    )  # fmt: skip
    return _Way(client, path.removesuffix("key"), scope[2] if plain else "", plain)


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
