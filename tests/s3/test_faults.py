"""What goes wrong between us and an S3 server: got over, or one clear error; never a wrong byte."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adacheck_store.format.errors import (
    AccessRefusedError,
    AdaCheckError,
    NotOursError,
    RecordNotFoundError,
    TierDamagedError,
    TierError,
    TierFullError,
    TierReadOnlyError,
    TierUnavailableError,
)
from adacheck_store.tiers import s3_multipart
from adacheck_store.tiers.object_s3 import S3Objects, crc32
from tests.s3.proxy import Fault, Proxy, Request, at, once, sound
from tests.s3.server import OWNER, READER, Server, free_ports, use

pytestmark = pytest.mark.fault
DATA = os.urandom(300_000)

PASSING = {
    "reset": Fault("reset"),
    "lost reply": Fault("lost"),
    "silent": Fault("silent"),
    "late": Fault("", seconds=0.1),
    "SlowDown": Fault("error", 503, "SlowDown"),
    "internal": Fault("error", 500, "InternalError"),
    "bad gateway": Fault("error", 502, ""),
    "time-out": Fault("error", 400, "RequestTimeout"),
    "throttled": Fault("error", 429, "TooManyRequests"),
    "flipped on its way out": Fault("flip out"),
    "flipped on its way in": Fault("flip in"),
    "cut": Fault("cut"),
    "short": Fault("short"),
}


def through(real: Server, proxy: Proxy, **options: str) -> S3Objects:
    """A fresh place behind the proxy."""
    chosen = {"timeout_s": "20", **options}
    objects = S3Objects(real.url(endpoint=proxy.endpoint, **chosen))
    objects.put("first", [b"x"])  # the sweep of the dead's uploads is past
    return objects


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", PASSING)
def test_passing_faults(real: Server, proxy: Proxy, name: str) -> None:
    """Each kind of call meets each fault, and then succeeds with the right bytes."""
    objects, fault = through(real, proxy), PASSING[name]
    times = 1 if name == "silent" else 2
    for create in (False, True):
        proxy.restart(once(fault, "PUT", times=times))
        assert objects.put(f"a/{create}", [DATA], if_absent=create)
        assert real.client().get_object(
            Bucket=objects.place.bucket, Key=objects.place.key(f"a/{create}")
        )["Body"].read() == DATA  # fmt: skip
    proxy.restart(once(fault, "GET", times=times))
    assert objects.get("a/True") == DATA
    if name != "flipped on its way in":  # of a part no checksum is kept: a block's digest tells
        proxy.restart(once(fault, "GET", times=times))
        assert objects.get("a/True", 1000, 99_000) == DATA[1000:100_000]
    proxy.restart(once(fault, "HEAD", times=times))
    assert objects.get("a/True", 0, 0) == b""
    proxy.restart(once(fault, "GET", "list-type", times=times))
    assert list(objects.list("a/")) == ["a/False", "a/True"]
    proxy.restart(once(fault, "POST", "delete", times=times))
    objects.delete(["a/False", "a/True"])
    assert list(objects.list("a/")) == []
    proxy.restart()


@pytest.mark.usefixtures("quick")
def test_checksums_whatever_boto3_is_told(
    real: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's settings may switch boto3's own checksums off, never ours."""
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    objects = through(real, proxy)
    objects.put("a", [DATA])
    found = real.client().head_object(
        Bucket=objects.place.bucket, Key=objects.place.key("a"), ChecksumMode="ENABLED"
    )
    assert found["ChecksumCRC32"] == crc32(DATA)
    proxy.restart(once(Fault("flip in"), "GET"))
    assert objects.get("a") == DATA


@pytest.mark.usefixtures("quick")
def test_the_training_s_generator_is_left_alone(real: Server, proxy: Proxy) -> None:
    """Pauses are drawn from a generator of their own: Python's is part of what is restored."""
    objects = through(real, proxy)
    state = random.getstate()
    proxy.restart(once(Fault("error", 503, "SlowDown"), times=3))
    objects.put("a", [b"x"])
    assert random.getstate() == state
    assert objects.requests()["again"] == 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["lost", "reset", "silent"])
def test_whose_claim_it_is(real: Server, proxy: Proxy, how: str) -> None:
    """A lost reply to a conditional create: it was ours, or it is somebody else's."""
    objects = through(real, proxy)
    proxy.restart(once(Fault(how), "PUT"))
    assert objects.put("log/1", [b"mine"], if_absent=True)
    other = S3Objects(real.url(objects.place.prefix))
    assert not other.put("log/1", [b"mine"], if_absent=True), "alike is not the same"

    def beaten(request: Request) -> Fault | None:
        """The first attempt never arrives, and meanwhile somebody else is there."""
        if request.kind == "PUT" and not taken:
            taken.append(other.put("log/2", [b"theirs"], if_absent=True))
            return Fault(how if how != "lost" else "reset")
        return None

    taken: list[bool] = []
    proxy.restart(beaten)
    assert not objects.put("log/2", [b"mine"], if_absent=True)
    assert taken == [True]
    assert objects.get("log/2") == b"theirs"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [409, 412])
def test_conflicts(real: Server, proxy: Proxy, status: int) -> None:
    """409 is a race that is tried again; either, of a name that is free, is no answer at all."""
    code = {409: "ConditionalRequestConflict", 412: "PreconditionFailed"}[status]
    objects = through(real, proxy, timeout_s="2")
    if status == 409:
        proxy.restart(once(Fault("error", 409, code), "PUT", times=2))
        assert objects.put("log/1", [b"mine"], if_absent=True)
    proxy.restart(once(Fault("error", status, code), "PUT", times=1000))
    with pytest.raises(TierUnavailableError):
        objects.put("log/2", [b"mine"], if_absent=True)
    proxy.restart()
    assert objects.put("log/2", [b"mine"], if_absent=True)
    proxy.restart(once(Fault("error", status, code), "PUT", times=1000))
    other = S3Objects(real.url(objects.place.prefix, endpoint=proxy.endpoint))
    assert not other.put("log/2", [b"yours"], if_absent=True)


REFUSALS: dict[str, tuple[Fault, type[AdaCheckError], str, str]] = {
    "expired": (Fault("error", 400, "ExpiredToken"), AccessRefusedError, "expired", "renew"),
    "skewed": (Fault("error", 403, "RequestTimeTooSkewed"), AccessRefusedError, "clock", "clock"),
    "region": (
        Fault("error", 400, "AuthorizationHeaderMalformed", "<Region>eu-west-9</Region>"),
        AccessRefusedError, "another region", "region=eu-west-9",
    ),
    "moved": (
        Fault("error", 301, "PermanentRedirect", header="x-amz-bucket-region: eu-west-9"),
        AccessRefusedError, "another region", "region=eu-west-9",
    ),
    "secret": (
        Fault("error", 403, "SignatureDoesNotMatch"), AccessRefusedError, "not known", "secret"
    ),
    "bucket": (Fault("error", 404, "NoSuchBucket"), NotOursError, "no such bucket", "URL"),
    "quota": (Fault("error", 403, "QuotaExceeded"), TierFullError, "no room", "quota"),
    "archived": (
        Fault("error", 403, "InvalidObjectState"), TierDamagedError, "as it is", "archive"
    ),
    "strange": (Fault("error", 418, "Teapot"), TierUnavailableError, "Teapot", "endpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(real: Server, proxy: Proxy, name: str) -> None:
    """What another attempt would meet again is one clear error at once that says what to do."""
    fault, kind, why, hint = REFUSALS[name]
    objects = through(real, proxy)
    for act in (lambda: objects.get("first"), lambda: objects.put("a", [b"x"]),
                lambda: list(objects.list("")), lambda: objects.delete(["first"])):  # fmt: skip
        proxy.restart(lambda request: fault)
        with pytest.raises(kind, match=why) as caught:
            act()
        assert hint in caught.value.hint
        assert "s3://ckpt" in caught.value.place["path"]
        assert len(proxy.requests) <= 4, "it is not tried again and again"
    proxy.restart()
    assert objects.get("first") == b"x", "the store is used on"


def test_access_denied(real: Server) -> None:
    """Each says which permission is wanted, where; a wrong secret or key is told from that."""
    url = real.url()
    S3Objects(url).put("a", [b"x"])
    use(READER)
    reader = S3Objects(url)
    assert reader.get("a") == b"x"
    for act, wanted in (
        (lambda: reader.put("b", [b"x"]), "s3:PutObject"),
        (lambda: reader.put("b", [b"x"], if_absent=True), "s3:PutObject"),
        (lambda: reader.delete(["a"]), "s3:DeleteObject"),
        (lambda: reader.put("b", [bytes(33 << 20)]), "s3:PutObject"),
    ):
        with pytest.raises(TierReadOnlyError) as caught:
            act()
        assert f"{wanted} on arn:aws:s3:::ckpt/{reader.place.prefix}/*" in caught.value.hint
    for key in ((OWNER[0], "wrong"), ("nobody", "x")):
        use(key)
        with pytest.raises(AccessRefusedError, match="not known"):
            S3Objects(url).get("a")


def test_no_credentials(real: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all, and a profile that is not there."""
    url = real.url()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AccessRefusedError, match="no credentials") as caught:
        S3Objects(url).get("a")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    use(OWNER)
    with pytest.raises(AccessRefusedError, match="nobodys"):
        S3Objects(f"{url}&profile=nobodys").get("a")


def test_credentials_that_are_renewed(
    real: Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running writer goes on with what `~/.aws/credentials` has by then."""
    file = tmp_path / "credentials"

    def write(key: tuple[str, str]) -> None:
        file.write_text(f"[default]\naws_access_key_id={key[0]}\naws_secret_access_key={key[1]}\n")

    write(READER)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    objects = S3Objects(real.url(endpoint=proxy.endpoint))

    def expires(request: Request) -> Fault | None:
        return (
            Fault("error", 400, "ExpiredToken") if READER[0].encode() in request.headers else None
        )

    proxy.restart(expires)
    with pytest.raises(AccessRefusedError, match="expired"):
        objects.put("a", [b"x"])
    write(OWNER)
    assert objects.put("a", [b"x"])
    use(OWNER)


def test_a_real_clock_that_is_wrong(real: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself judges what a host an hour late has signed."""
    late = datetime.now(UTC) - timedelta(hours=1)
    objects = S3Objects(real.url(timeout_s="3"))
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: late)
    with pytest.raises(AccessRefusedError, match="clock") as caught:
        objects.get("a")
    assert "set the clock" in caught.value.hint


def test_a_deadline(real: Server, proxy: Proxy) -> None:
    """A server that never recovers is given up in time, and the error says how it was tried."""
    objects = through(real, proxy, timeout_s="1.5")
    proxy.restart(lambda request: Fault("error", 503, "SlowDown"))
    start = time.monotonic()
    with pytest.raises(TierUnavailableError, match=r"SlowDown.*\(\d+ attempts\)"):
        objects.get("a")
    assert time.monotonic() - start < 30  # of which all but 1.5 s are a busy machine's
    assert 2 <= len(proxy.requests) < 40
    proxy.restart()
    with pytest.raises(RecordNotFoundError):
        objects.get("a")


def test_nobody_listens(real: Server) -> None:
    """A port without a server, a host that is none, a certificate nobody vouches for."""
    (port,) = free_ports(1)
    for endpoint in (f"http://127.0.0.1:{port}", "http://nowhere.invalid"):
        with pytest.raises(TierUnavailableError, match="does not answer") as caught:
            S3Objects(real.url(endpoint=endpoint, timeout_s="0.5")).get("a")
        assert "endpoint" in caught.value.hint


def test_those_refused_together_do_not_come_back_together(real: Server, proxy: Proxy) -> None:
    """Pauses are random and grow: clients spread out."""
    objects = through(real, proxy)
    times: list[float] = []

    def slow(request: Request) -> Fault | None:
        times.append(time.monotonic())
        return Fault("error", 503, "SlowDown") if len(times) <= 16 else None

    proxy.restart(slow)
    threads = [threading.Thread(target=objects.put, args=(f"n/{n}", [b"x"])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(list(objects.list("n/"))) == 8
    counted = objects.requests()
    assert counted["again"] == 16
    assert counted["put"] == 1 + 8 + 16
    later = sorted(times[8:])
    assert max(later) - min(later) > 0.05


PARTS: list[Fault] = [
    Fault("reset"),
    Fault("lost"),
    Fault("error", 500, "InternalError"),
    Fault("flip out"),
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", PARTS, ids=lambda fault: fault.how)
@pytest.mark.parametrize("create", [False, True])
def test_an_upload_in_parts(
    real: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: Fault, create: bool
) -> None:
    """Each of its requests fails once, in turn; it ends whole, and leaves nothing behind."""
    monkeypatch.setattr("adacheck_store.tiers.object_s3.MULTIPART_BYTES", 5 << 20)
    monkeypatch.setattr(s3_multipart, "PART_BYTES", 5 << 20)
    objects = through(real, proxy)
    data, number = os.urandom(6 << 20), 0
    while True:
        proxy.restart(at(number, fault))
        assert objects.put(f"big/{number}", [data], if_absent=create)
        made = len(proxy.requests)
        proxy.restart()
        assert objects.get(f"big/{number}") == data
        number += 1
        if number >= made:
            break
    assert number >= 4
    proxy.restart()
    lost_begin = fault.how == "lost"  # an upload whose number never arrived; it is swept later
    assert objects.unfinished() == int(lost_begin)


def test_an_upload_that_cannot_end_is_withdrawn(
    real: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that never arrives: the error is the part's, and the other parts are given back."""
    monkeypatch.setattr("adacheck_store.tiers.object_s3.MULTIPART_BYTES", 5 << 20)
    monkeypatch.setattr(s3_multipart, "PART_BYTES", 5 << 20)
    objects = through(real, proxy, timeout_s="1")
    broken = Fault("error", 500, "InternalError")
    proxy.restart(once(broken, "PUT", "partNumber=2", times=1000))
    with pytest.raises(TierUnavailableError):
        objects.put("big", [bytes(11 << 20)])
    proxy.restart(sound)
    assert objects.unfinished() == 0
    with pytest.raises(RecordNotFoundError):
        objects.get("big")


def _never(act: Callable[[], object]) -> None:
    with pytest.raises(TierError):
        act()


def test_a_lost_reply_to_a_delete(real: Server, proxy: Proxy) -> None:
    """Deleted twice is deleted; one object's refusal among many is an error."""
    objects = through(real, proxy)
    for name in "abc":
        objects.put(name, [b"x"])
    proxy.restart(once(Fault("lost"), "POST"))
    objects.delete(["a", "b"])
    assert list(objects.list("")) == ["c", "first"]
    proxy.restart(lambda request: Fault("error", 403, "AccessDenied"))
    _never(lambda: objects.delete(["c"]))
