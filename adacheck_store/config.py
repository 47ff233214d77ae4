"""Settings, and the only place that reads the environment."""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from adacheck_store.format.bodies import BOUNDED_STEPS
from adacheck_store.format.errors import UsageError
from adacheck_store.format.head import SealedHead
from adacheck_store.tiers import failpoints

from .policy import Retention

POLICIES = ("lossless", "bf16")
RESUMES = ("auto", "must", "never")
REDUNDANCIES = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a writer of a run can be told.

    ``policy``: ``lossless`` stores what reproduces the optimizer's input bit for bit; ``bf16``
    rounds gradients in place before the step. ``window``: records in flight, W. ``base_every``:
    steps between replayed bases. ``full_every``: steps between captured bases where updates cannot
    be folded (class ``unsupported``). ``object_lag`` and ``object_lag_s``: how far, in steps and in
    seconds, the object tier may stay behind. ``keep_bases``: bases a tier keeps, with what
    follows. ``retention``: which steps the far tier keeps besides (None: tagged ones, and what the
    last floor kept). ``bounded_every``: steps between captured bases where folds here have another
    arithmetic than the trainer (class ``bounded``), at most 256. ``max_drift``: the largest
    difference of any number of the state that such a fold may have, in that number's own unit.
    ``stall_timeout_s``: how long a step waits at W before training goes on exposed.
    ``grace_s``: age in seconds before a superseded record of the object tier is deleted.
    ``lmdb_bytes``: capacity of the LMDB tier (0: nine tenths of what the disk has for it). ``k``:
    failure domains that the agents' memories survive losing at once; without agents not used.
    ``sigterm_grace_s``: seconds in which a trainer that gets SIGTERM stores what it has and ends
    (0: the signal is left alone). ``max_deaths``: attempts that end without getting any further,
    one after the other, before a restore begins at an older step (0: it never does).
    ``redundancy``: ``auto`` finds what several ranks have copies of, and keeps it once; ``off``
    keeps on every rank all that it has.
    """

    policy: str = "lossless"
    window: int = 2
    base_every: int = 64
    full_every: int = 64
    object_lag: int = 64
    object_lag_s: float = 60.0
    keep_bases: int = 2
    retention: Retention | None = None
    bounded_every: int = BOUNDED_STEPS
    max_drift: float = 1e-3
    stall_timeout_s: float = 30.0
    grace_s: float = 60.0
    start_step: int = 0
    resume: str = "auto"
    strict: bool = False
    lmdb_bytes: int = 0
    k: int = 1
    sigterm_grace_s: float = 0.0
    max_deaths: int = 3
    redundancy: str = "auto"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"policy {self.policy!r}", hint=f"one of {POLICIES}")
        if self.resume not in RESUMES:
            raise UsageError(f"resume {self.resume!r}", hint=f"one of {RESUMES}")
        if self.redundancy not in REDUNDANCIES:
            raise UsageError(f"redundancy {self.redundancy!r}", hint=f"one of {REDUNDANCIES}")
        least = {
            "window": 1, "base_every": 1, "full_every": 1, "object_lag": 1, "keep_bases": 1,
            "start_step": 0, "k": 0, "max_deaths": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise UsageError(f"{name}={value!r}", hint=f"an integer of at least {low}")
        if type(self.bounded_every) is not int or not 1 <= self.bounded_every <= BOUNDED_STEPS:
            hint = f"an integer from 1 to {BOUNDED_STEPS}"
            raise UsageError(f"bounded_every={self.bounded_every!r}", hint=hint)
        if not isinstance(self.retention, Retention | None):
            raise UsageError(f"keep={self.retention!r:.200}", hint="how many, or a Retention")
        for name in ("max_drift", "sigterm_grace_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise UsageError(f"{name}={value!r}", hint="a number that is not negative")


def environment() -> Mapping[str, str]:
    """The process environment."""
    return os.environ


def node_name() -> str:
    """Name of this host: ``ADACHECK_NODE``, else the machine id, else the host name."""
    named = environment().get("ADACHECK_NODE", "")
    if named:
        safe = "".join(c for c in named if c.isalnum() or c in "._-")
        if safe != named or not named[0].isalnum():
            raise UsageError(f"ADACHECK_NODE={named!r}", hint="use letters, digits, . _ -")
        return named
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isalnum():
            return text[:32]
    return socket.gethostname() or "localhost"


def local_rank(rank: int) -> int:
    """Number of this rank on its host: ``LOCAL_RANK`` as torchrun sets it, else its number."""
    text = environment().get("LOCAL_RANK", "")
    return int(text) if text.isascii() and text.isdigit() else rank


def runtime_folder() -> Path:
    """Where agents of this user have their sockets: ``ADACHECK_RUNTIME``, else the user's own."""
    named = environment().get("ADACHECK_RUNTIME", "")
    if named:
        return Path(named).absolute()
    session = environment().get("XDG_RUNTIME_DIR", "")
    if session and os.path.isdir(session):
        return Path(session) / "adacheck-store"
    return Path(tempfile.gettempdir()) / f"adacheck-store-{os.geteuid()}"


def cache_folder() -> Path:
    """Where LMDBs lie of stores that are no folders: ``ADACHECK_CACHE``, else the user's cache."""
    named = environment().get("ADACHECK_CACHE", "")
    if named:
        return Path(named).absolute()
    shared = environment().get("XDG_CACHE_HOME", "")
    base = Path(shared) if shared.startswith("/") else Path.home() / ".cache"
    return base / "adacheck-store"


def boot_id() -> str:
    """The kernel's name for this host since it was started; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def memory_available() -> int:
    """Bytes of memory that could be taken without swapping (Linux; else 4 GiB)."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 4 << 30


def memory_resident(pid: int | None = None) -> int:
    """Bytes that a process (this one) has in memory and no named file stands for (Linux; else 0).

    The records of an agent lie in a file without a name, which the process has not mapped.
    """
    process = Path("/proc") / str(pid or "self")
    found = 0
    with suppress(OSError, ValueError, IndexError):
        for line in (process / "status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found += int(rest.split()[0]) << 10
        files = {}
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed since
                if os.readlink(link).startswith("/memfd:"):
                    files[link.stat().st_ino] = link.stat().st_blocks
        found += 512 * sum(files.values())
    return found


def local_size(ranks: int) -> int:
    """How many of a run's ranks are on this host: ``LOCAL_WORLD_SIZE``, else all of them."""
    text = environment().get("LOCAL_WORLD_SIZE", "")
    known = int(text) if text.isascii() and text.isdigit() else 0
    return min(known, ranks) or ranks


def writer_info() -> dict[str, str]:
    """Who writes and when: for a record's ``info``, never part of its id."""
    from adacheck_store import __version__

    version = f"adacheck-store {__version__}"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"writer": version, "host": platform.node(), "pid": str(os.getpid()), "time": now}


def made_at(sealed: SealedHead) -> float | None:
    """When a record was made, as its writer says: seconds since 1970, None if it does not say."""
    try:
        return datetime.fromisoformat(json.loads(sealed.info)["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def arm_failpoints() -> None:
    """Arm the failpoints that ``ADACHECK_FAILPOINT`` names, by commas apart (tests), if any."""
    for spec in filter(None, environment().get("ADACHECK_FAILPOINT", "").split(",")):
        failpoints.arm(spec)
