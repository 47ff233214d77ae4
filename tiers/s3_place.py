"""Where an S3 store lies, as its URL says: bucket, prefix, endpoint, and how to talk to it.

``s3://bucket/prefix?endpoint=https://host&region=eu-west-1``. What the URL leaves out boto3 finds
where it always does: ``AWS_*`` variables, ``~/.aws``, the instance's role. No secret stands in a
URL, so one may be logged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from adacheck_store.format.errors import NameRefusedError, UsageError

from .objects import check_name

STYLES = ("auto", "path", "virtual")
_PREFIX_BYTES_MAX = 512
_OPTIONS = (
    "endpoint", "region", "style", "ca", "profile", "timeout_s", "parallel",
    "unsafe_no_conditional_writes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """A store's place in S3, and the options of its URL.

    ``prefix`` has no slash at its ends, and may be empty. ``style``: how the bucket is named in a
    request: in the path, as the host (``virtual``), or ``auto``: in the path where an endpoint is
    given. ``ca``: a file of certificates to trust instead of the system's. ``timeout_s``: how long
    one call is tried again before it fails. ``parallel``: calls under way at once.
    ``unsafe_no_conditional_writes``: go on where the server ignores conditions; two writers of
    one run may then both believe to have it.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    style: str = "auto"
    ca: str = ""
    profile: str = ""
    timeout_s: float = 30.0
    parallel: int = 8
    unsafe_no_conditional_writes: bool = False

    @property
    def name(self) -> str:
        """One name for one store, whatever options its URL has."""
        where = f"?endpoint={quote(self.endpoint, safe=':/')}" if self.endpoint else ""
        return f"s3://{self.bucket}/{quote(self.prefix)}{where}"

    @property
    def url(self) -> str:
        """The whole URL, the same for the same place and options."""
        plain = S3Place(bucket=self.bucket)
        given = {key: getattr(self, key) for key in _OPTIONS}
        shown = {k: int(v) if v is True else v for k, v in given.items() if v != getattr(plain, k)}
        query = f"?{urlencode(shown, safe=':/')}" if shown else ""
        return f"s3://{self.bucket}/{quote(self.prefix)}{query}"

    def key(self, name: str) -> str:
        """The S3 key of an object, or the beginning of such keys; raises `NameRefusedError`."""
        key = f"{self.prefix}/{name}" if self.prefix else name
        if len(key.encode()) > 1024:
            raise NameRefusedError(f"an S3 key of more than 1024 bytes: {key[:100]!r}...",
                                   hint="use a shorter prefix", path=self.name)  # fmt: skip
        return key


def parse_s3(url: str) -> S3Place:
    """The place that a URL names; raises `UsageError`, which never repeats a secret."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise UsageError(f"not an s3:// URL: {url[:100]!r}")
    if "@" in parts.netloc:
        raise UsageError(
            "credentials in a URL end up in logs", path=f"s3://{parts.netloc.rpartition('@')[2]}",
            hint="leave them out: use AWS_ACCESS_KEY_ID, ~/.aws/credentials or a role",
        )  # fmt: skip
    shown = f"s3://{parts.netloc}{parts.path}"
    if not parts.netloc or parts.fragment:
        raise UsageError(f"not a bucket and prefix: {shown!r}",
                         hint="s3://bucket/prefix; percent-encode ? and #")  # fmt: skip
    prefix = unquote(parts.path).strip("/")
    try:
        if prefix:
            check_name(prefix)
    except NameRefusedError as error:
        raise UsageError(
            f"not a prefix: {prefix[:100]!r}", path=shown,
            hint="names apart by single slashes, none of them . or ..",
        ) from error  # fmt: skip
    if len(prefix.encode()) > _PREFIX_BYTES_MAX:
        raise UsageError(f"a prefix of more than {_PREFIX_BYTES_MAX} bytes", path=shown)
    options = _options(parts.query, shown)
    return S3Place(bucket=parts.netloc, prefix=prefix, **options)


def _options(query: str, shown: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError("options that are not name=value", path=shown,
                         hint=f"?name=value&..., of {', '.join(_OPTIONS)}") from error  # fmt: skip
    options: dict[str, Any] = dict(pairs)
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown or len(options) != len(pairs):
        raise UsageError(f"options unknown or given twice: {unknown or query}"[:300], path=shown,
                         hint=f"of {', '.join(_OPTIONS)}")  # fmt: skip
    try:
        if "timeout_s" in options:
            options["timeout_s"] = float(options["timeout_s"])
        if "parallel" in options:
            options["parallel"] = int(options["parallel"])
        if "unsafe_no_conditional_writes" in options:
            flags = {"1": True, "true": True, "0": False, "false": False}
            options["unsafe_no_conditional_writes"] = flags[options["unsafe_no_conditional_writes"]]
    except (ValueError, KeyError) as error:
        raise UsageError(f"an option's value: {error}", path=shown) from error
    _check(options, shown)
    if options.get("ca"):
        options["ca"] = os.path.abspath(options["ca"])
    options["endpoint"] = options.get("endpoint", "").rstrip("/")
    return options


def _check(options: dict[str, Any], shown: str) -> None:
    endpoint = urlsplit(options.get("endpoint", ""))
    if endpoint.geturl() and (endpoint.scheme not in ("http", "https") or not endpoint.hostname):
        raise UsageError("not an endpoint", path=shown, hint="endpoint=https://host:port")
    if "@" in endpoint.netloc or endpoint.query:
        raise UsageError("an endpoint with credentials or a query", path=shown,
                         hint="endpoint=https://host:port")  # fmt: skip
    if options.get("style", "auto") not in STYLES:
        raise UsageError(f"style={options['style']!r}"[:100], path=shown, hint=f"one of {STYLES}")
    if not 0.1 <= options.get("timeout_s", 30.0) <= 3600:
        raise UsageError("timeout_s is out of range", path=shown, hint="seconds, 0.1 to 3600")
    if not 1 <= options.get("parallel", 8) <= 128:
        raise UsageError("parallel is out of range", path=shown, hint="calls at once, 1 to 128")
