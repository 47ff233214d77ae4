"""Places: the folder of an agent, which lock says that it lives, and what dead ones leave behind.

One agent for a node, a store and a run. Its folder's name is a digest of the three; whoever holds
the lock there is the agent, for as long as it holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adacheck_store.config import runtime_folder
from adacheck_store.format.errors import TierReadOnlyError, UsageError
from adacheck_store.location import Location, locate
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.medium import translate

KEEP_LOG_S = 24 * 3600.0
"""How long the log of an agent that has ended is kept."""

_NAME = re.compile(r"[0-9a-f]{16}")
_TIER = "agent"


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of an agent, and the names in it."""

    folder: Path

    @property
    def socket(self) -> Endpoint:
        """Where it is reached on this node; raises `UsageError` for a path that is too long."""
        return Endpoint.parse(f"unix:{self.folder / 'agent.sock'}")

    @property
    def lock(self) -> Path:
        """The file whose lock the agent holds for life."""
        return self.folder / "agent.lock"

    @property
    def starting(self) -> Path:
        """The file whose lock is held by who starts the agent."""
        return self.folder / "start.lock"

    @property
    def info(self) -> Path:
        """What the agent says of itself, as JSON."""
        return self.folder / "agent.json"

    @property
    def port(self) -> Path:
        """The file with the port where other nodes reach it, or reached the last one here."""
        return self.folder / "agent.port"

    @property
    def log(self) -> Path:
        """Where its output goes if it was started by a trainer."""
        return self.folder / "agent.log"

    def read_info(self) -> dict[str, Any]:
        """What the agent has said of itself; empty if nothing that can be read."""
        try:
            found = json.loads(self.info.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_info(self, info: dict[str, Any]) -> None:
        """Say something of this agent, whole or not at all."""
        draft = self.info.with_suffix(".tmp")
        draft.write_text(json.dumps(info), encoding="utf-8")
        draft.replace(self.info)

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:500] if lines else ""


def store_name(url: str) -> str:
    """One name for one store, however its URL is written; raises `UsageError` as `store` does."""
    return _shared(url).name


def store_url(url: str) -> str:
    """A store's URL for another process, wherever that runs; raises what `store_name` does."""
    return _shared(url).url


def _shared(url: str) -> Location:
    if url.startswith("memory://"):
        raise UsageError(
            "memory:// stores are of one process, an agent is another",
            hint="use file:///folder or s3://bucket/prefix", path=url,
        )  # fmt: skip
    return locate(url)


def place_of(url: str, run: str, node: str) -> Place:
    """The place of the agent of a node for a run of a store; nothing is made yet."""
    name = json.dumps([store_name(url), run, node]).encode()
    return Place(runtime_folder() / hashlib.blake2b(name, digest_size=8).hexdigest())


def keys_folder() -> str:
    """Where the keys of this user's runs lie."""
    return str(runtime_folder() / "keys")


def _ours(folder: Path) -> bool:
    """True for a folder of this user."""
    try:
        return os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def make(place: Place) -> None:
    """Make the folder, private to this user; raises `TierReadOnlyError` where it is not."""
    for folder in (place.folder.parent, place.folder):
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.lstat(folder)
        except FileNotFoundError:  # reclaimed in between
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.lstat(folder)
        except OSError as error:
            raise translate(error, _TIER, str(folder)) from error
        if found.st_uid != os.geteuid():
            raise TierReadOnlyError(
                f"a folder for agents of user {found.st_uid}, and this process is of user "
                f"{os.geteuid()}", path=str(folder),
                hint="set ADACHECK_RUNTIME to a folder of your own with mode 700",
            )  # fmt: skip
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise TierReadOnlyError(
                f"a folder for agents that is open to others: mode "
                f"{stat.S_IMODE(found.st_mode):o}", path=str(folder),
                hint="set ADACHECK_RUNTIME to a folder of your own with mode 700",
            )  # fmt: skip


def take(place: Place, path: Path) -> int | None:
    """Lock a file of the folder, made if absent: the descriptor that holds it, None if another
    process does. A lock on a file that was reclaimed meanwhile is no lock."""
    while True:
        make(place)
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if (held := _locked(fd, path)) is not False:
                return fd if held else None


def _locked(fd: int, path: Path) -> bool | None:
    """True if the descriptor holds the lock of the file at the path; else it is closed.

    None where another process holds it, False where that is another file by now.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return True
    os.close(fd)
    return False


def alive(place: Place) -> bool:
    """True if an agent holds the place."""
    try:
        fd = os.open(place.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def places() -> Iterator[Place]:
    """All places of this user's agents, living and dead."""
    with suppress(FileNotFoundError):
        for path in sorted(runtime_folder().iterdir()):
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield Place(path)


def reclaim(skip: Place | None = None) -> list[Path]:
    """Remove what dead agents have left; their logs a day later. Returns the folders.

    Where somebody starts an agent, or one lives, nothing is touched; nor is what is not ours.
    """
    found: list[Path] = []
    for place in places():
        if place == skip or not _ours(place.folder):
            continue
        starting = take(place, place.starting)
        if starting is None:
            continue
        held = take(place, place.lock)
        try:
            if held is not None:
                _clear(place)
                found.append(place.folder)
        finally:
            for fd in (starting, held):
                if fd is not None:
                    os.close(fd)
    return found


def _clear(place: Place) -> None:
    with suppress(OSError):
        os.unlink(place.socket.path)
    for path in (place.info, place.port):
        with suppress(OSError):
            path.unlink()
    try:
        old = time.time() - place.log.stat().st_mtime > KEEP_LOG_S
    except OSError:
        old = True
    if old:
        shutil.rmtree(place.folder, ignore_errors=True)
