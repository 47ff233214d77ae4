"""A store on S3: written by a run, restored by a fresh machine, looked at by every verb."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest
import safetensors.torch
import torch

import adacheck_store as ada
from adacheck_store.format.errors import (
    NotOursError,
    TierReadOnlyError,
    TooNewError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.location import locate
from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading, open_store
from adacheck_store.tiers.object_s3 import S3Objects
from adacheck_store.tiers.s3_client import requests_in
from adacheck_store.tiers.s3_place import parse_s3
from adacheck_store.tiers.zarr import ZarrTier
from tests.conformance.records import MIB, World, noise
from tests.core.toy import Toy
from tests.s3.proxy import Fault, Proxy, Request
from tests.s3.server import BUCKET, READER, Server, server, use
from tests.tools.stores import LAST, RUN, cli, cli_json, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Toy]:
    """A run of two terms in a bucket, whose machine is lost."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("trained")
    patch.setenv("ADACHECK_CACHE", str(folder))
    url = server().url()
    train(url, LAST - 10)
    toy = train(url, LAST)
    assert list(folder.glob("*/lmdb/*/data.mdb")), "the near tier is local, by the store's name"
    shutil.rmtree(folder)
    patch.undo()
    return url, toy


def test_restored_from_the_url_alone(
    trained: tuple[str, Toy], real: Server, tmp_path: Path
) -> None:
    """Bit for bit, by one call and by the command; what was asked for is counted."""
    url, toy = trained
    with open_for_reading(url) as store:
        restored = restore_state(store.tiers, RUN)
        assert store.far.objects.requests()["get"] > 0  # type: ignore[attr-defined]
    assert restored.step == LAST
    found = restored.parts["p000000"].arrays["s0/param"]
    for p, piece in zip(toy.params, toy.section.slices, strict=True):
        cut = found[piece.offset : piece.offset + piece.elements]
        assert torch.equal(cut, p.detach().reshape(-1))
    file = tmp_path / "out.safetensors"
    assert cli("restore", url, file).exit_code == 0
    written = safetensors.torch.load_file(file)
    for name, p in zip((f"w{i}" for i in range(9)), toy.params, strict=False):
        assert torch.equal(written[f"model/{name}"], p.detach())
    assert not (tmp_path / "cache").exists(), "reading makes nothing"


@pytest.mark.parametrize("verb", ["ls", "log", "status", "fsck"])
def test_verbs_read_with_a_readers_key(trained: tuple[str, Toy], real: Server, verb: str) -> None:
    """Every verb that reads, with a key that may only read."""
    use(READER)
    code, document = cli_json(verb, trained[0])
    assert code == 0, document
    assert document["rows"]
    assert cli("show", trained[0], LAST).exit_code == 0


def test_a_readers_key_restores_and_cannot_write(
    trained: tuple[str, Toy], real: Server, tmp_path: Path
) -> None:
    """What is missing is said, and nothing is changed."""
    before = real.keys(parse_s3(trained[0]).prefix)
    use(READER)
    assert cli("restore", trained[0], tmp_path / "out.safetensors").exit_code == 0
    for act in (lambda: train(trained[0], LAST + 5), lambda: train(real.url(), 5)):
        with pytest.raises(TierReadOnlyError, match="s3:PutObject"):
            act()
    result = cli("compact", trained[0], "--to", LAST - 1)
    assert result.exit_code == 3
    assert "s3:PutObject" in result.stderr
    assert real.keys(parse_s3(trained[0]).prefix) == before


def test_requests_are_counted(real: Server) -> None:
    """What a running writer has asked of S3 is in its status, as the server's side has it."""
    with Proxy(real.endpoint) as proxy:
        url = real.url(endpoint=proxy.endpoint)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with ada.attach(model, optimizer, "counted", url) as ckpt:
            ckpt.restore()
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            ckpt.flush(60)
            counted = ckpt.status().requests
            kinds = Counter(_kind(request) for request in proxy.requests)
    assert requests_in(counted) == kinds.total()
    assert counted["put"] == kinds["put"] >= 8
    assert counted["get"] == kinds["get"]
    assert counted["list"] == kinds["list"]
    assert counted["bytes out"] == sum(
        len(request.body) for request in proxy.requests if _kind(request) == "put"
    )


def test_runs_of_a_long_record_are_one_request_each(real: Server) -> None:
    """Also of the second one in its pack, which begins with an object."""
    world, tier = World(), ZarrTier(S3Objects(real.url()))
    size = 15 * MIB + MIB // 2
    deltas = [world.delta(step, {"set/s0/param": ("U8", noise(size))}) for step in (1, 2)]
    tier.put([*world.roots(), *deltas])
    memory = bytearray(size)
    for delta in deltas:
        tier.head(delta.key)
        before = tier.requests()["get"]
        for first, count in ((0, 8), (8, 8)):
            view = memoryview(memory)[first * MIB : (first + count) * MIB]
            tier.read_into(delta.key, "set/s0/param", first, count, view)
        assert tier.requests()["get"] - before == 2
        assert memory == delta.record.arrays["set/s0/param"]


def _kind(request: Request) -> str:
    """The kind of a request by what is on the wire."""
    if request.kind == "GET":
        special = {"list-type": "list", "uploads": "uploads"}
        return next((kind for word, kind in special.items() if word in request.path), "get")
    return {"PUT": "put", "HEAD": "head", "POST": "delete"}[request.kind]


def test_compact_on_s3(real: Server) -> None:
    """A base of a step that had none, written beside; fsck stays clean."""
    url = real.url()
    train(url, 13)
    assert cli("compact", url, "--to", "11").exit_code == 0
    code, document = cli_json("fsck", url)
    assert code == 0, document
    assert any("/base/000000000011-" in key for key in real.keys(parse_s3(url).prefix))


def test_two_runs_and_two_stores_beside_each_other(real: Server) -> None:
    """Runs share a prefix, stores a bucket; one name may begin with the other."""
    url = real.url()
    for run in ("run1", "run10"):
        train(url, 6, run=run)
    longer = url.replace("?", "0?", 1)
    train(longer, 6, run="other")
    _, document = cli_json("ls", url)
    assert [row["run"] for row in document["rows"]] == ["run1", "run10"]
    for name, run in ((url, "run1"), (url, "run10"), (longer, "other")):
        assert cli_json("fsck", name, f"--run={run}")[0] == 0
    with open_for_reading(url) as store:
        assert all(key.startswith("run1/") for key in store.far.list("run1/"))


def test_a_prefix_in_many_scripts(real: Server, tmp_path: Path) -> None:
    """Spaces, umlauts, ideograms and signs that URLs use themselves: written, listed, restored."""
    name = f"{tmp_path.name} ü/专家 +&=%25"
    url = real.url(quote(name, safe="/"))
    toy = train(url, 6)
    assert real.keys(f"{name}/{RUN}/log/")
    assert cli("fsck", url).exit_code == 0
    assert cli("gc", url, "--last", 1, "--grace", 0, "--apply").exit_code == 0
    shutil.rmtree(tmp_path / "cache")
    with open_for_reading(url) as store:
        assert toy.same_as(restore_state(store.tiers, RUN).parts["p000000"])


def test_somebody_elses_bucket(real: Server) -> None:
    """Refused by writer and reader, and nothing is put there or taken away."""
    url = real.url()
    objects = S3Objects(url)
    objects.put("photos/cat.jpg", [b"meow"])
    for act in (lambda: train(url, 3), lambda: open_store(url), lambda: open_store(url)):
        with pytest.raises(NotOursError, match="something else"):
            act()
    assert list(objects.list("")) == ["photos/cat.jpg"]
    assert "no store here" in cli("ls", real.url()).stderr
    assert "no such bucket" in cli("ls", real.url().replace(BUCKET, "nobodys")).stderr
    newer = real.url()
    S3Objects(newer).put("adacheck.json", [b'{"format": "adacheck-store", "version": 2}'])
    for act in (lambda: train(newer, 3), lambda: open_store(newer)):
        with pytest.raises(TooNewError, match="version 2"):
            act()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "bucket"), ("s3:///x", "bucket"), ("s3://b/a/../c", "prefix"),
        ("s3://b/a//c", "prefix"), ("s3://b/%2e%2e", "prefix"), ("s3://b/a%00", "prefix"),
        ("s3://b/" + "x/" * 300, "prefix"), ("s3://b/x#y", "bucket"), ("s3://b?nope=1", "unknown"),
        ("s3://b?region=a&region=b", "twice"), ("s3://b?endpoint=host:9", "endpoint"),
        ("s3://b?endpoint=http://a:b@host", "endpoint"), ("s3://b?style=x", "style"),
        ("s3://b?timeout_s=x", "value"), ("s3://b?timeout_s=0", "timeout_s"),
        ("s3://b?parallel=0", "parallel"), ("s3://b?unsafe_no_conditional_writes=maybe", "value"),
        ("s3://b?region", "name=value"),
    ],
)  # fmt: skip
def test_strange_urls(url: str, why: str) -> None:
    """Each says what is wrong with it, and how it should be."""
    with pytest.raises(UsageError, match=why) as caught:
        parse_s3(url)
    assert caught.value.hint or caught.value.place
    assert cli("ls", url).exit_code == 2


def test_a_secret_in_a_url_is_never_repeated() -> None:
    """Not in the message, not in the path, not on the command line."""
    result = cli("ls", "s3://AKIA123:hush@bucket/x")
    assert result.exit_code == 2
    assert "hush" not in result.output + str(result.exception)
    assert "AKIA123" not in result.output
    assert "AWS_ACCESS_KEY_ID" in result.stderr


def test_one_name_for_one_store() -> None:
    """Options and ways of writing do not make another store, places do; a URL is kept whole."""
    same = ["s3://b/a%20%C3%BC?endpoint=http://h:9", "s3://b/a ü/?endpoint=http://h:9/&region=x"]
    assert len({locate(url).name for url in same}) == 1
    others = [
        "s3://b/a?endpoint=http://h:9",
        "s3://b/a?endpoint=http://h:8",
        "s3://b/a",
        "s3://c/a",
    ]
    assert len({locate(url).name for url in others}) == 4
    url = "s3://b/a?endpoint=http://h&region=x&style=path&ca=/c.pem&profile=p&timeout_s=5.0&parallel=3"
    assert parse_s3(parse_s3(url).url) == parse_s3(url)
    assert parse_s3("s3://b?unsafe_no_conditional_writes=1").unsafe_no_conditional_writes
    assert "unsafe_no_conditional_writes=1" in parse_s3("s3://b?unsafe_no_conditional_writes=1").url


def _unconditional(request: Request) -> Fault | None:
    """A server that ignores If-None-Match, as some do: it takes what it has already."""
    if request.kind == "PUT" and b"if-none-match" in request.headers.lower():
        return Fault("accept")
    return None


def _unheard_of(request: Request) -> Fault | None:
    """A server that says it does not know If-None-Match."""
    if request.kind == "PUT" and b"if-none-match" in request.headers.lower():
        return Fault("error", 501, "NotImplemented")
    return None


@pytest.mark.parametrize("script", [_unconditional, _unheard_of])
def test_no_conditional_writes(real: Server, proxy: Proxy, script) -> None:  # type: ignore[no-untyped-def]
    """Seen before anything is claimed, and refused; taken where the user says so."""
    url = real.url()
    train(url, 3)
    through = f"{url}&timeout_s=5".replace(real.endpoint, proxy.endpoint)
    proxy.restart(script)
    with pytest.raises(UnsupportedError, match="If-None-Match") as caught:
        train(through, 6)
    assert "unsafe_no_conditional_writes=1" in caught.value.hint
    toy = train(f"{through}&unsafe_no_conditional_writes=1", 6)
    proxy.restart()
    with open_for_reading(url) as store:
        restored = restore_state(store.tiers, RUN)
    assert restored.step == toy.step == 6
    _, document = cli_json("log", url)
    assert len([row for row in document["rows"] if row["row"] == "TermRow"]) == 2, document
