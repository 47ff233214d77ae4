"""The key of a run: what agents and trainers of one run show each other between nodes.

A run has one EC key pair with a certificate it signed itself. Both sides of a connection present
that certificate, and each accepts nothing but its public key: who has not the key is not let in.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from adacheck_store.format.errors import (
    AdaCheckError,
    FormatError,
    MalformedError,
    NotOursError,
    RecordNotFoundError,
    TierReadOnlyError,
    TooNewError,
)
from adacheck_store.format.ids import new_nonce
from adacheck_store.format.keys import check_run

from .medium import translate
from .tls import TlsSocket
from .wire import decode_json

BUNDLE_VERSION = 1
MAX_BUNDLE_BYTES = 16 << 10
_TIER = "credentials"
_BEGINS = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""A run's certificate does not expire: a clock that is wrong must not stop a restore."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A run's key pair: the private key and the certificate, both PEM. Equal only if the same."""

    run: str
    key: str
    certificate: str

    def __repr__(self) -> str:
        return f"Credentials(run={self.run!r}, fingerprint={self.fingerprint[:16]!r})"

    @property
    def fingerprint(self) -> str:
        """Name of the public key: sha-256 of its DER form, in hex."""
        return public_fingerprint(x509.load_pem_x509_certificate(self.certificate.encode()))

    @property
    def server_name(self) -> str:
        """The name under which a server knows the run (TLS's SNI, and the certificate's)."""
        return server_name(self.run)

    def export(self) -> bytes:
        """The bundle for a rendezvous, and the bytes of the file."""
        return json.dumps(
            {"adacheck_credentials": BUNDLE_VERSION, "run": self.run, "key": self.key,
             "certificate": self.certificate}
        ).encode()  # fmt: skip

    @classmethod
    def load(cls, bundle: bytes) -> Credentials:
        """Inverse of `export`. Raises `NotOursError`, `TooNewError` or `MalformedError`."""
        if len(bundle) > MAX_BUNDLE_BYTES:
            raise MalformedError(f"credentials of {len(bundle)} bytes", rule="credentials")
        try:
            fields = decode_json(bundle)
        except FormatError as exc:
            raise NotOursError("no credentials of adacheck-store") from exc
        version = fields.get("adacheck_credentials") if isinstance(fields, dict) else None
        if type(version) is not int:
            raise NotOursError("no credentials of adacheck-store")
        if version > BUNDLE_VERSION:
            raise TooNewError(
                f"credentials of version {version}, this program reads up to {BUNDLE_VERSION}",
                hint="upgrade adacheck-store",
            )
        texts = [fields.get(name) for name in ("run", "key", "certificate")]
        if not all(isinstance(text, str) for text in texts):
            raise MalformedError("credentials without run, key or certificate", rule="credentials")
        found = cls(*texts)
        found.check()
        return found

    def check(self) -> None:
        """Raise `MalformedError` unless key and certificate belong together and to the run."""
        check_run(self.run)
        try:
            key = load_pem_private_key(self.key.encode(), password=None)
            certificate = x509.load_pem_x509_certificate(self.certificate.encode())
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            mine = names.value.get_values_for_type(x509.DNSName) == [self.server_name]
            same = key.public_key() == certificate.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as exc:
            text = f"credentials that cannot be read: {exc}"[:200]
            raise MalformedError(text, rule="credentials", run=self.run) from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not same or not mine:
            raise MalformedError(
                "key and certificate do not belong together", rule="credentials", run=self.run
            )


def server_name(run: str) -> str:
    """The name under which a server knows a run: a digest, since names there know no case."""
    return hashlib.blake2b(run.encode(), digest_size=16).hexdigest() + ".adacheck"


def public_fingerprint(certificate: x509.Certificate) -> str:
    """sha-256 of a certificate's public key in DER form, in hex."""
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def make(run: str) -> Credentials:
    """A fresh key pair for a run."""
    check_run(run)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, server_name(run))])
    alternative = x509.SubjectAlternativeName([x509.DNSName(server_name(run))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINS)
        .not_valid_after(_ENDS)
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Credentials(run, private.decode(), certificate.public_bytes(Encoding.PEM).decode())


# -- files --


def path_of(folder: str, run: str) -> str:
    """Where a run's key lies in a folder of keys."""
    return os.path.join(folder, f"{check_run(run)}.key")


def read(folder: str, run: str) -> Credentials:
    """The run's key as it lies in a folder.

    Raises `RecordNotFoundError` where there is none, `TierReadOnlyError` where others than the
    owner might have read it, `FormatError` for a file of something else.
    """
    path = path_of(folder, run)
    try:
        _check_folder(folder)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        raise RecordNotFoundError("no key of this run", run=run, path=path) from exc
    except OSError as exc:
        raise translate(exc, _TIER, path) from exc
    try:
        _check_private(os.fstat(fd), path, stat.S_ISREG)
        found = Credentials.load(os.read(fd, MAX_BUNDLE_BYTES + 1))
    except AdaCheckError as exc:
        exc.at(path=path, run=run)
        raise
    finally:
        os.close(fd)
    if found.run != run:
        raise MalformedError(f"the key of run {found.run!r}", rule="credentials", path=path)
    return found


def write(folder: str, credentials: Credentials, *, replace: bool = False) -> Credentials:
    """Keep a run's key in a folder: 0600 in 0700, whole or not at all.

    Without ``replace`` a key that is there stays. Returns what stands there afterwards.
    """
    path = path_of(folder, credentials.run)
    draft = f"{path}.{new_nonce()}.tmp"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _check_folder(folder)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o600)
                file.write(credentials.export())
                file.flush()
                os.fsync(fd)
            if replace:
                os.replace(draft, path)
            else:
                with suppress(FileExistsError):
                    os.link(draft, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as exc:
        raise translate(exc, _TIER, path) from exc
    return read(folder, credentials.run)


def read_or_make(folder: str, run: str) -> tuple[Credentials, bool]:
    """The run's key, made where there is none; and whether it was there before."""
    with suppress(RecordNotFoundError):
        return read(folder, run), True
    fresh = make(run)
    kept = write(folder, fresh)
    return kept, kept != fresh


def _check_folder(folder: str) -> None:
    _check_private(os.stat(folder), folder, stat.S_ISDIR)


def _check_private(found: os.stat_result, path: str, is_kind: Callable[[int], bool]) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not is_kind(found.st_mode):
        raise TierReadOnlyError(
            f"not private: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}, "
            f"wanted owner {os.geteuid()} and nothing for others",
            hint="find out who else could read it; then give it to its owner alone (chmod go=), "
            "or delete it to have a new key made",
            tier=_TIER, path=path,
        )  # fmt: skip


# -- rendezvous --


def choose(brought: Iterable[tuple[Credentials, bool]]) -> Credentials:
    """The key all will use, of what every rank brings: its key, and whether that existed before.

    An existing key wins: agents that outlived the trainers know it. Of several existing ones the
    one most bring; else, and among equals, the smallest fingerprint: the order in which ranks
    come has no influence. All must be of one run; raises `MalformedError`.
    """
    offers = list(brought)
    if len({offer.run for offer, _ in offers}) != 1:
        runs = sorted({offer.run for offer, _ in offers})
        raise MalformedError(f"keys of {runs or 'no run'} at one rendezvous", rule="credentials")
    existing = [offer for offer, before in offers if before]
    votes = Counter(existing)
    return min(
        existing or [offer for offer, _ in offers],
        key=lambda offer: (-votes[offer], offer.fingerprint, offer.export()),
    )


# -- TLS --


@functools.lru_cache(maxsize=64)
def client_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 for who connects: shows the run's certificate, and accepts it alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _fill(context, credentials)


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 for who is connected to, for one run."""
    context = bare_server_context()
    return _fill(context, credentials)


def bare_server_context() -> ssl.SSLContext:
    """TLS 1.3 that demands a certificate and has none: for who must first hear of which run."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # nothing is resumed: every connection proves the key anew
    return context


def _fill(context: ssl.SSLContext, credentials: Credentials) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.certificate)
    # The library reads keys from files only; this one has no name and is gone when closed.
    fd = os.memfd_create("adacheck-key", os.MFD_CLOEXEC)
    try:
        os.write(fd, f"{credentials.key}{credentials.certificate}".encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def is_pinned(sock: TlsSocket | ssl.SSLSocket, fingerprint: str) -> bool:
    """Whether the other side of a finished handshake proved the key of this fingerprint."""
    certificate = sock.getpeercert(binary_form=True)
    if not certificate:
        return False
    return public_fingerprint(x509.load_der_x509_certificate(certificate)) == fingerprint


class RunContexts:
    """The runs a server knows by their keys. Any thread may call any method."""

    def __init__(self, credentials: Iterable[Credentials] = ()) -> None:
        self._runs: dict[str, tuple[Credentials, ssl.SSLContext]] = {}
        self._bare = bare_server_context()
        self._bare.sni_callback = self._choose
        for each in credentials:
            self.add(each)

    def add(self, credentials: Credentials) -> None:
        """Know a run by this key; another one of the same run is forgotten."""
        context = server_context(credentials)
        self._runs[credentials.server_name] = (credentials, context)

    def remove(self, run: str) -> None:
        """Forget a run."""
        self._runs.pop(server_name(run), None)

    def wrap(self, sock: socket.socket) -> TlsSocket:
        """The TLS side of a connection just accepted; the handshake is still to be made."""
        return TlsSocket(sock, self._bare, server_side=True)

    def proven_run(self, sock: TlsSocket) -> str | None:
        """The run whose key the other side of a finished handshake has proven."""
        for credentials, context in list(self._runs.values()):
            if sock.context is context and is_pinned(sock, credentials.fingerprint):
                return credentials.run
        return None

    def _choose(
        self, sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> int | None:
        found = self._runs.get(name or "")
        if found is None:
            return ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        sock.context = found[1]
        return None
