"""Keys of runs: private on disk, whole or not there, and one for all after a rendezvous."""

import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    MalformedError,
    NameRefusedError,
    NotOursError,
    RecordNotFoundError,
    TierDamagedError,
    TierReadOnlyError,
    TooNewError,
)
from adacheck_store.tiers import credentials
from adacheck_store.tiers.credentials import Credentials, choose, make, read, read_or_make, write

ONE, TWO, THREE = (make("gpt-small") for _ in range(3))
OTHER = make("gpt-other")


def test_bundle_round_trip() -> None:
    """What is exported is what was made, and the key is not said by accident."""
    assert Credentials.load(ONE.export()) == ONE
    assert ONE.key not in repr(ONE)
    assert ONE.fingerprint[:16] in repr(ONE)
    assert len({each.fingerprint for each in (ONE, TWO, THREE)}) == 3


@pytest.mark.parametrize(
    ("bundle", "error"),
    [
        (b"", NotOursError),
        (b"\x80\x04K\x01.", NotOursError),
        (b"{}", NotOursError),
        (ONE.export().replace(b'credentials": 1', b'credentials": true'), NotOursError),
        (ONE.export().replace(b'credentials": 1', b'credentials": 2'), TooNewError),
        (ONE.export()[:-1], NotOursError),
        (ONE.export() + b" " * (16 << 10), MalformedError),
        (ONE.export().replace(b"gpt-small", b"gpt-large"), MalformedError),
        (ONE.export().replace(b"gpt-small", b"../small"), NameRefusedError),
        (ONE.export().replace(b"MII", b"MIJ"), MalformedError),
        (replace(ONE, key=TWO.key).export(), MalformedError),
        (replace(ONE, certificate="").export(), MalformedError),
        (replace(ONE, key=ONE.certificate).export(), MalformedError),
    ],
)
def test_bundles_that_are_refused(bundle: bytes, error: type[AdaCheckError]) -> None:
    """Not ours, too new, cut, another run's, halves that do not belong together."""
    with pytest.raises(error):
        Credentials.load(bundle)


def test_file_is_private(tmp_path: Path) -> None:
    """0600 in 0700, whatever the umask says, and nothing else is left there."""
    folder = tmp_path / "run" / "keys"
    before = os.umask(0)
    try:
        made, existed = read_or_make(str(folder), "gpt-small")
    finally:
        os.umask(before)
    assert not existed
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_or_make(str(folder), "gpt-small") == (made, True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_wider_permissions_are_refused(tmp_path: Path, mode: int) -> None:
    """A key others might have read is not used; the message says what to do."""
    write(str(tmp_path), ONE)
    file = tmp_path / "gpt-small.key"
    file.chmod(mode)
    with pytest.raises(TierReadOnlyError, match=f"{mode:o}") as caught:
        read(str(tmp_path), "gpt-small")
    assert "chmod" in caught.value.hint
    assert caught.value.place["path"] == str(file)
    file.chmod(0o600)
    tmp_path.chmod(0o750)
    with pytest.raises(TierReadOnlyError, match="750"):
        read(str(tmp_path), "gpt-small")
    tmp_path.chmod(0o700)
    assert read(str(tmp_path), "gpt-small") == ONE


def test_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of another user is not ours, private or not."""
    write(str(tmp_path), ONE)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TierReadOnlyError, match="owner"):
        read(str(tmp_path), "gpt-small")


def test_what_is_no_key_file(tmp_path: Path) -> None:
    """Links, folders, pipes and files of something else: a typed error, at once."""
    with pytest.raises(RecordNotFoundError):
        read(str(tmp_path / "none"), "gpt-small")
    file = tmp_path / "gpt-small.key"
    file.symlink_to("/dev/zero")
    with pytest.raises(TierDamagedError):
        read(str(tmp_path), "gpt-small")
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(AdaCheckError):
        read(str(tmp_path), "gpt-small")
    file.unlink()
    file.mkdir(mode=0o700)
    with pytest.raises(AdaCheckError):
        read(str(tmp_path), "gpt-small")
    file.rmdir()
    file.write_bytes(make("other").export())
    file.chmod(0o600)
    with pytest.raises(MalformedError, match="other"):
        read(str(tmp_path), "gpt-small")
    file.write_bytes(b"secret")
    with pytest.raises(FormatError) as caught:
        read(str(tmp_path), "gpt-small")
    assert caught.value.place["path"] == str(file)


def test_a_key_that_is_there_stays(tmp_path: Path) -> None:
    """Unless it is to be replaced, as after a rendezvous that another one has won."""
    assert write(str(tmp_path), ONE) == ONE
    assert write(str(tmp_path), TWO) == ONE
    assert write(str(tmp_path), TWO, replace=True) == TWO
    assert [file.name for file in tmp_path.iterdir()] == ["gpt-small.key"]


def test_many_make_one(tmp_path: Path) -> None:
    """Threads that all find no key end with the same one."""
    found: list[tuple[Credentials, bool]] = []
    threads = [
        threading.Thread(target=lambda: found.append(read_or_make(str(tmp_path), "gpt-small")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 8
    assert len({each.export() for each, _ in found}) == 1
    assert [existed for _, existed in found].count(False) == 1


def test_killed_while_writing(tmp_path: Path) -> None:
    """A process killed before the name is given leaves no key, and none of its parts is one."""
    code = (
        "import os, signal, sys; from adacheck_store.tiers import credentials as c\n"
        "os.link = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "c.read_or_make(sys.argv[1], 'gpt-small')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60, check=False)
    assert done.returncode < 0
    with pytest.raises(RecordNotFoundError):
        read(str(tmp_path), "gpt-small")
    assert not read_or_make(str(tmp_path), "gpt-small")[1]


def test_an_existing_key_wins() -> None:
    """Whoever brings it, and whatever fresh ones come before it."""
    for order in permutations([(ONE, False), (TWO, True), (THREE, False)]):
        assert choose(order) == TWO


def test_of_several_existing_keys_most_votes_win() -> None:
    """Then the fingerprint decides; the order of the ranks never does."""
    offers = [(ONE, True), (TWO, True), (TWO, True), (THREE, False), (THREE, False), (THREE, False)]
    assert {choose(order) for order in permutations(offers)} == {TWO}
    even = [(ONE, True), (TWO, True), (THREE, True)]
    smallest = min((ONE, TWO, THREE), key=lambda each: each.fingerprint)
    assert {choose(order) for order in permutations(even)} == {smallest}
    fresh = [(each, False) for each, _ in even]
    assert {choose(order) for order in permutations(fresh)} == {smallest}


def test_a_rendezvous_is_of_one_run() -> None:
    """Keys of two runs, or none at all, are refused."""
    with pytest.raises(MalformedError, match="gpt-large"):
        choose([(ONE, True), (make("gpt-large"), True)])
    with pytest.raises(MalformedError):
        choose([])


@pytest.mark.parametrize("shown", [ONE, OTHER])
def test_the_key_is_pinned(shown: Credentials) -> None:
    """Even where the library would trust another certificate, the run's own key counts alone."""
    here, there = socket.socketpair()
    trusting = credentials.server_context(ONE)
    trusting.load_verify_locations(cadata=OTHER.certificate)
    context = credentials.client_context.__wrapped__(shown)
    context.load_verify_locations(cadata=ONE.certificate)
    client: list[ssl.SSLSocket] = []

    def connect() -> None:
        client.append(context.wrap_socket(there, server_hostname=ONE.server_name))

    connecting = threading.Thread(target=connect)
    connecting.start()
    server = trusting.wrap_socket(here, server_side=True)
    connecting.join(timeout=10)
    assert credentials.is_pinned(client[0], ONE.fingerprint)
    assert credentials.is_pinned(server, ONE.fingerprint) == (shown is ONE)
    assert credentials.is_pinned(server, OTHER.fingerprint) == (shown is OTHER)
    client[0].close()
    server.close()


@pytest.mark.parametrize("old", ["client", "server"])
def test_nothing_older_than_tls_1_3(old: str) -> None:
    """Who has the run's key and speaks 1.2 alone is refused, by agents and by their clients."""
    here, there = socket.socketpair()
    server = credentials.server_context(ONE)
    client = credentials.client_context.__wrapped__(ONE)
    lowered = client if old == "client" else server
    lowered.minimum_version = lowered.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect() -> None:
        with suppress(OSError), there:
            client.wrap_socket(there, server_hostname=ONE.server_name).close()

    connecting = threading.Thread(target=connect)
    connecting.start()
    with here, pytest.raises(OSError, match=r"(?i)version|protocol"):
        server.wrap_socket(here, server_side=True)
    connecting.join(timeout=10)


def test_what_hears_of_the_run_first_speaks_tls_1_3_alone() -> None:
    """The context that a server begins every handshake with."""
    assert credentials.bare_server_context().minimum_version is ssl.TLSVersion.TLSv1_3


def test_no_key_leaves_the_process(tmp_path: Path) -> None:
    """The library wants a file; the one it gets has no name anywhere."""
    before = set(os.listdir("/proc/self/fd"))
    credentials.server_context(ONE)
    credentials.client_context(TWO)
    assert set(os.listdir("/proc/self/fd")) == before
