"""The client of an S3 store: one boto3 client, calls tried again within a deadline, all counted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from adacheck_store.format.errors import AdaCheckError

from .s3_errors import ShortReadError, Trouble, translate
from .s3_place import S3Place

T = TypeVar("T")
_PAUSE_S, _SLOW_PAUSE_S, _PAUSE_MAX_S = 0.05, 0.2, 8.0
_CONNECT_S, _READ_S = 5.0, 20.0
_CONFLICT_ATTEMPTS = 8
_RANDOM = random.Random()
"""Our own: the module's generator is part of the state of a training."""


def requests_in(counts: Mapping[str, int]) -> int:
    """How many requests some counts amount to."""
    return sum(n for kind, n in counts.items() if kind not in ("again", "bytes in", "bytes out"))


class ConflictError(Exception):
    """A condition that did not hold. ``again``: an earlier attempt may have been ours."""


class S3Client:
    """Makes calls to S3; thread-safe.

    A call that fails for a passing reason (SlowDown, 5xx, a cut or silent connection, a damaged
    body) is made again after a random pause that doubles, until ``timeout_s`` is over; the last
    attempt may end later by its own time-out. All other errors are raised at once. Credentials
    that have expired are looked up anew, once a call.
    """

    def __init__(self, place: S3Place) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._client: Any = None
        self._made = 0
        self.counts: Counter[str] = Counter()

    def call(
        self, kind: str, key: str, send: Callable[[Any], T], *, sent: int = 0,
        got: Callable[[T], int] = lambda reply: 0,
    ) -> T:  # fmt: skip
        """Make a call of a kind (``put``, ``get``, ``head``, ``list``, ``delete``, ...).

        ``send`` makes it with the client it is given, and reads the reply to its end; ``sent`` and
        what ``got`` says of the reply are counted as bytes. Raises `ConflictError` for a condition
        that does not hold, else an `AdaCheckError` that says what to do.
        """
        end = time.monotonic() + self.place.timeout_s
        refreshed, attempt, conflicts = False, 0, 0
        while True:
            client, made = self._connect(key)
            self._count(kind, sent, attempt)
            try:
                reply = send(client)
            except AdaCheckError:
                raise
            except Exception as exc:
                trouble = _trouble(exc, kind, self.place, key)
                if trouble.expired and not refreshed:
                    refreshed = True
                    self._renew(made)
                    continue
                conflicts += trouble.conflict
                if trouble.conflict and (not trouble.passing or conflicts >= _CONFLICT_ATTEMPTS):
                    raise ConflictError(trouble.code) from exc
                attempt += 1
                pause = _pause(attempt, trouble.slow)
                if not trouble.passing or time.monotonic() + pause > end:
                    raise _last(trouble, attempt) from exc
                time.sleep(pause)
            else:
                with self._lock:
                    self.counts["bytes in"] += got(reply)
                return reply

    def requests(self) -> Mapping[str, int]:
        """Requests so far by kind, those ``again`` among them, and bytes sent and received."""
        with self._lock:
            return dict(self.counts)

    def _count(self, kind: str, sent: int, attempt: int) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.counts["bytes out"] += sent
            self.counts["again"] += attempt > 0

    def _connect(self, key: str) -> tuple[Any, int]:
        with self._lock:
            if self._client is None:
                try:
                    self._client = make_client(self.place)
                except Exception as exc:
                    raise translate(exc, "get", self.place, key).error from exc
            return self._client, self._made

    def _renew(self, made: int) -> None:
        """Make a new client, which looks its credentials up anew, unless another thread has."""
        with self._lock:
            if self._made == made:
                self._client = None
                self._made += 1


def make_client(place: S3Place) -> Any:
    """A boto3 client by boto3's own rules and the options of a place."""
    import boto3  # half a second that stores without S3 need not wait for
    import botocore.session
    from botocore.config import Config

    from adacheck_store import __version__

    style = place.style
    if style == "auto" and place.endpoint:
        style = "path"
    config = Config(
        signature_version="s3v4",  # for signed URLs too
        connect_timeout=min(_CONNECT_S, place.timeout_s),
        read_timeout=min(_READ_S, place.timeout_s),
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=place.parallel + 4,
        s3={"addressing_style": style},
        tcp_keepalive=True,
        user_agent_extra=f"adacheck-store/{__version__}",
    )
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader())
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    session = boto3.session.Session(botocore_session=core, profile_name=place.profile or None)
    return session.client(
        "s3", endpoint_url=place.endpoint or None, region_name=place.region or None,
        verify=place.ca or None, config=config,
    )  # fmt: skip


def _moment(value: Any) -> datetime:
    """A time in a reply: listings have one a name, and boto3's own parser takes most of a page."""
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        from botocore.utils import parse_timestamp

        found: datetime = parse_timestamp(value)
        return found


@cache
def _loader() -> Any:
    """Descriptions of the service, a megabyte of JSON: read once, not for each client."""
    from botocore.loaders import Loader

    return Loader()


def _trouble(exc: Exception, kind: str, place: S3Place, key: str) -> Trouble:
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    if not isinstance(exc, (BotoCoreError, ClientError, HTTPError, OSError, ShortReadError)):
        raise exc
    return translate(exc, kind, place, key)


def _pause(attempt: int, slow: bool) -> float:
    """A random pause: clients that were refused together do not come back together."""
    longest = min(_PAUSE_MAX_S, (_SLOW_PAUSE_S if slow else _PAUSE_S) * 2.0**attempt)
    return _RANDOM.uniform(0.0, longest)


def _last(trouble: Trouble, attempts: int) -> AdaCheckError:
    if trouble.passing and attempts > 1:
        trouble.error.message += f" ({attempts} attempts)"
    return trouble.error
