"""A real S3 server, SeaweedFS, for the tests of one process: started once, ended with it."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BUCKET = "ckpt"
ENDPOINT = "ADACHECK_TEST_S3"
OWNER = ("ciaccess", "cisecretcisecret")
READER = ("roaccess", "rosecretrosecret")
DOMAIN = "s3.test"
"""The server's own name: buckets are hosts below it, in virtual style."""
_LISTENERS = ("-s3.port", "-master.port", "-volume.port", "-filer.port")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_SIDE_DOORS = ("-s3.port.https", "-admin.port", "-s3.port.iceberg", "-s3.port.lance")


def _end_with_parent() -> None:
    """In a new process: be killed when the thread that has started it ends, however it does."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Server:
    """A running SeaweedFS with one bucket, an owner who may do anything and a reader."""

    def __init__(self, ports: list[int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="adacheck-weed-"))
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self.https = f"https://127.0.0.1:{ports[len(_LISTENERS)]}"
        self.ca = certify(self.folder)
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}],
             "actions": actions}
            for name, (key, secret), actions in (
                ("owner", OWNER, ["Admin", "Read", "Write", "List", "Tagging"]),
                ("reader", READER, ["Read", "List"]),
            )
        ]  # fmt: skip
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        data = self.folder / "data"
        data.mkdir()
        named = dict(zip(_LISTENERS + _SIDE_DOORS, ports, strict=False))
        options = [f"{name}={port}" for name, port in named.items()]
        grpc = [f"{name}.grpc={port}" for name, port in
                zip((*_LISTENERS, "-admin.port"), ports[len(named):], strict=True)]  # fmt: skip
        command = [
            str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "mini",
            f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false",
            "-admin.ui=false", "-master.telemetry=false", f"-s3.config={config}", *options, *grpc,
            f"-s3.cert.file={self.folder / 'cert.pem'}", f"-s3.key.file={self.folder / 'key.pem'}",
            f"-s3.domainName={DOMAIN}",
        ]  # fmt: skip
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder)}, preexec_fn=_end_with_parent,
            )  # fmt: skip
        atexit.register(self.stop)
        self._await()

    def _await(self) -> None:
        client, end = self.client(), time.monotonic() + 90
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="up", Body=b"x")
                client.delete_object(Bucket=BUCKET, Key="up")
                return
            except ClientError as error:
                if "BucketAlready" in str(error):
                    client.put_object(Bucket=BUCKET, Key="up", Body=b"x")
                    return
                trouble: Exception = error
            except BotoCoreError as error:
                trouble = error
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no S3 server: {trouble}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def client(self, key: tuple[str, str] = OWNER, **options: Any) -> Any:
        """A plain boto3 client, to look behind our own."""
        return boto3.session.Session().client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=key[0],
            aws_secret_access_key=key[1], region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1},
                          **options),
        )  # fmt: skip

    def url(self, prefix: str = "", endpoint: str = "", **options: str) -> str:
        """The URL of a store; a prefix that nobody else has, unless one is given."""
        prefix = prefix or secrets.token_hex(6)
        more = "".join(f"&{name}={quote(value)}" for name, value in options.items())
        where = quote(endpoint or self.endpoint, safe=":/")
        return f"s3://{BUCKET}/{prefix}?endpoint={where}&region=us-east-1{more}"

    def keys(self, prefix: str = "") -> list[str]:
        """The names of objects."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        )
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def stop(self) -> None:
        """End it by SIGKILL: its own way out takes half a minute."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


def certify(folder: Path) -> Path:
    """A key and a certificate that speaks for itself, for 127.0.0.1 and all of the domain."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, DOMAIN)])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName(DOMAIN), x509.DNSName(f"*.{DOMAIN}"),
         x509.IPAddress(ip_address("127.0.0.1"))]
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    file = folder / "cert.pem"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return file


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at; all below 55 536, as some servers add 10 000."""
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.append(port)
    return found


@cache
def server() -> Server:
    """The server of this process: a worker of a parallel run has its own.

    Its owner's key is in the environment from then on, where boto3 looks first, here and in
    processes that tests start; so is the endpoint, for `url_of`.
    """
    count = 2 * len(_LISTENERS) + len(_SIDE_DOORS) + 1
    found = Server(free_ports(count))
    os.environ[ENDPOINT] = found.endpoint
    use(OWNER)
    return found


def use(key: tuple[str, str]) -> None:
    """Let boto3 find a key, and nothing that this machine has besides."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=key[0], AWS_SECRET_ACCESS_KEY=key[1], AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )  # fmt: skip


def url_of(path: Path) -> str:
    """The URL of the store that stands for a folder, alike in a test and in its children."""
    if ENDPOINT not in os.environ:
        server()
    prefix = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    return f"s3://{BUCKET}/{prefix}?endpoint={os.environ[ENDPOINT]}"
