"""What an error of boto3 amounts to: to be tried again, or one of our tree that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adacheck_store.format.errors import (
    AccessRefusedError,
    AdaCheckError,
    NotOursError,
    RecordNotFoundError,
    TierDamagedError,
    TierFullError,
    TierReadOnlyError,
    TierUnavailableError,
)

from .s3_place import S3Place

WRITES = {
    "put": "s3:PutObject", "multipart": "s3:PutObject", "delete": "s3:DeleteObject",
    "abort": "s3:AbortMultipartUpload",
}  # fmt: skip
_READS = {
    "get": "s3:GetObject and s3:ListBucket", "head": "s3:GetObject and s3:ListBucket",
    "list": "s3:ListBucket", "uploads": "s3:ListBucketMultipartUploads",
}  # fmt: skip

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_UNKNOWN_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "301", "TemporaryRedirect",
           "IllegalLocationConstraintException", "InvalidRegion"}  # fmt: skip
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidPayer", "403",
           "Forbidden", "MethodNotAllowed", "KMS.DisabledException"}  # fmt: skip
_MISSING = {"NoSuchKey", "404", "NotFound", "NoSuchVersion"}
_SLOW = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded",
         "TooManyRequests", "429", "ServiceUnavailable", "503"}  # fmt: skip
_PASSING = {"InternalError", "RequestTimeout", "OperationAborted", "BadDigest", "InvalidDigest",
            "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody",
            "ConditionalRequestConflict", "PriorRequestNotComplete",
            "RequestTimeoutException", "MalformedXML"}  # fmt: skip
_FULL = {"QuotaExceeded", "InsufficientStorage", "507", "XMinioStorageFull", "EntityTooLarge"}
_PASSING_KINDS = {
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError",
    "ConnectionError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError",
    "ProxyConnectionError", "FlexibleChecksumError", "ChecksumError", "ResponseParserError",
    "ProtocolError",
}  # fmt: skip
_CREDENTIALS_KINDS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError", "NoAuthTokenError",
    "MetadataRetrievalError", "RefreshWithMFAUnsupportedError", "ConfigParseError", "LoginError",
}  # fmt: skip


class ShortReadError(Exception):
    """A reply that is whole and too short, or of another range than was asked for."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error of one attempt.

    ``passing``: worth another attempt; ``slow``: the server asks for fewer; ``expired``: with
    credentials looked up anew. ``conflict``: a condition did not hold (412), or could not be told
    (409).
    """

    error: AdaCheckError
    code: str
    passing: bool = False
    slow: bool = False
    expired: bool = False
    conflict: bool = False


def translate(exc: Exception, kind: str, place: S3Place, key: str) -> Trouble:
    """What an exception of a call of some kind (``put``, ``get``, ...) amounts to."""
    response: dict[str, Any] = getattr(exc, "response", None) or {}
    path = f"s3://{place.bucket}/{key}"
    name = type(exc).__name__
    code = str(response.get("Error", {}).get("Code", "")) if response else name
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    said = f"{code}: {response.get('Error', {}).get('Message', '')}" if response else str(exc)
    if response:
        conflict = code in ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
        if conflict or status == 412:
            passing = code in ("ConditionalRequestConflict", "409")
            return Trouble(_unavailable(said, path), code, passing=passing, conflict=True)
        refused = _refused(exc, code, said, kind, place, path)
        if refused is not None:
            return Trouble(refused, code, expired=code in _EXPIRED)
        if code == "400" and kind == "head":  # no body says why: expired, or cut on its way
            return Trouble(_unavailable(said, path), code, passing=True, expired=True)
        slow = code in _SLOW or status in (429, 503)
        passing = status >= 500 or status in (200, 206, 408)  # an error may come as a success
        if (slow or code in _PASSING or passing) and status != 501:
            return Trouble(_unavailable(said, path), code, passing=True, slow=slow)
        return Trouble(_unavailable(said, path), code)
    if name in _CREDENTIALS_KINDS:
        return Trouble(_no_credentials(said, path), code, expired=name != "ProfileNotFound")
    if name == "SSLError":
        return Trouble(_certificate(said, path), code)
    passing = name in _PASSING_KINDS or isinstance(exc, (OSError, ShortReadError))
    return Trouble(_unavailable(said, path), code, passing=passing)


def _refused(
    exc: Exception, code: str, said: str, kind: str, place: S3Place, path: str
) -> AdaCheckError | None:
    """The error of a refusal that another attempt would meet again, if it is one."""
    if code == "NoSuchBucket":
        return NotOursError(
            f"no such bucket: {place.bucket}", path=path,
            hint="check the URL and endpoint; buckets are made by you, not by us",
        )  # fmt: skip
    if code in _MISSING:
        return RecordNotFoundError("no such object", path=path)
    if code in _EXPIRED:
        return AccessRefusedError(
            f"the credentials have expired ({said})", path=path,
            hint="renew them (aws sso login, or a new session token); a running writer finds them",
        )  # fmt: skip
    if code in _SKEWED:
        return AccessRefusedError(
            f"this host's clock differs too much from the server's ({said})", path=path,
            hint="set the clock (chronyc makestep, or timedatectl set-ntp true)",
        )  # fmt: skip
    if code in _UNKNOWN_KEY:
        return AccessRefusedError(
            f"the credentials are not known there ({said})", path=path,
            hint="check AWS_ACCESS_KEY_ID, the secret, the profile and the endpoint",
        )  # fmt: skip
    if code in _REGION:
        return _region(exc, said, place, path)
    if code in _DENIED:
        return _denied(said, kind, place, path)
    if code in _FULL:
        return TierFullError(
            f"no room: {said}", path=path, hint="raise the quota, or let retention delete more"
        )
    if code in ("InvalidObjectState", "InvalidStorageClass"):
        return TierDamagedError(
            f"an object that cannot be read as it is ({said})", path=path,
            hint="bring it back from the archive; lifecycle rules must not move a store's objects",
        )  # fmt: skip
    return None


def _region(exc: Exception, said: str, place: S3Place, path: str) -> AccessRefusedError:
    response: dict[str, Any] = getattr(exc, "response", {})
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region", "")
    named = f"add region={region} to the URL" if region else "add region=... to the URL"
    return AccessRefusedError(
        f"the bucket {place.bucket} is in another region ({said})", path=path,
        hint=f"{named}, or set AWS_REGION",
    )  # fmt: skip


def _denied(said: str, kind: str, place: S3Place, path: str) -> AdaCheckError:
    where = f"arn:aws:s3:::{place.bucket}/{place.prefix + '/' if place.prefix else ''}*"
    if kind in WRITES:
        return TierReadOnlyError(
            f"the credentials may not write here ({said})", path=path,
            hint=f"a writer needs {WRITES[kind]} on {where}; reading and restoring go on",
        )  # fmt: skip
    return AccessRefusedError(
        f"the credentials may not read here ({said})", path=path,
        hint=f"a reader needs {_READS.get(kind, 's3:GetObject')} on {where} and its bucket",
    )  # fmt: skip


def _no_credentials(said: str, path: str) -> AccessRefusedError:
    return AccessRefusedError(
        f"no credentials: {said}", path=path,
        hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give a role",
    )  # fmt: skip


def _certificate(said: str, path: str) -> AccessRefusedError:
    return AccessRefusedError(
        f"the server's certificate is not trusted: {said}"[:400], path=path,
        hint="add ca=/file.pem to the URL, or set AWS_CA_BUNDLE",
    )  # fmt: skip


def _unavailable(said: str, path: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"does not answer as it should: {said}"[:400], path=path,
        hint="check the endpoint and the network; it is tried again",
    )  # fmt: skip
