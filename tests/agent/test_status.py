"""What agents tell: one view of a run by ``status``, the same in numbers for Prometheus."""

import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adacheck_store.agent import metrics
from adacheck_store.tiers.endpoint import Endpoint
from tests.agent.kit import Node, two
from tests.agent.trainer import RUN, open_session, reference
from tests.core.kit import begin, make_toy, train
from tests.tools.stores import cli, cli_json
from tests.waits import until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    """All samples of an agent by name and labels; the run's and the node's are left out."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == RUN
            assert labels.pop("node") in ("a", "b")
            found[sample.name.removeprefix("adacheck_"), frozenset(labels.items())] = sample.value
    return found


def at(samples: Samples, name: str, **labels: str) -> float:
    """One sample."""
    return samples[name, frozenset(labels.items())]


def rows(node: Node, kind: str) -> list[dict[str, object]]:
    """Rows of ``status --json`` of a kind."""
    code, document = cli_json("status", node.url)
    assert code == 0
    return [row for row in document["rows"] if row["row"] == kind]


def test_one_view_of_a_run(pair: tuple[Node, Node], tmp_path: Path) -> None:
    here, other = pair
    block = tmp_path / "block"
    block.touch()
    here.agent("--metrics", "127.0.0.1:0", fail=f"local.rename.before=raise-eio@{block}")
    session, toy = two(here, other), make_toy()
    begin(session, toy, reference(0))
    train(session, toy, reference(0), 20)
    session.flush(30.0, far=False)
    until(lambda: "drain-far" in here.status()["last_errors"], "a drain fails")
    until(lambda: {node.status()["watermark"] for node in pair} == {19}, "the watermark")
    url = here.status()["metrics"]
    until(lambda: at(scrape(url), "replica_step", chain="p000000") == 16, "the fold is done")
    time.sleep(metrics.FRESH_S)
    samples, agents = scrape(url), {row["node"]: row for row in rows(here, "AgentRow")}
    chains = {(row["node"], row["chain"]): row for row in rows(here, "ChainRow")}
    drains = {(row["node"], row["place"]): row for row in rows(here, "DrainRow")}
    assert set(agents) == {"a", "b"}  # the other one by its endpoint and the run's key
    assert agents["a"]["metrics"] == url
    assert agents["a"]["trainers"] == 1
    assert 0 < agents["a"]["used"] <= agents["a"]["room"]
    assert 0 < agents["a"]["resident"] <= agents["a"]["memory"]
    part = chains["a", "p000000"]
    assert part["holders"] == {"a": 20, "b": 20}
    assert (part["newest_step"], part["watermark"], part["exposed"]) == (20, 19, False)
    assert chains["b", "p000000"]["newest_step"] == 20
    far = drains["a", "far"]
    assert far["records"] >= 40  # a delta and an extra a step
    assert far["nbytes"] > 0
    assert far["lag_steps"] >= 20
    assert "failpoint local.rename.before" in far["error"]
    assert drains["b", "far"]["records"] == 0  # the part's own node drains it
    tiers = {row["tier"]: row for row in rows(here, "TierRow")}
    assert tiers["all"]["newest"] == tiers["agent a"]["newest"] == 20  # and the far tier none

    for name, value in {
        "newest_step": 20, "exposed": 0, "holders_live": 2, "replica_step": part["replica_step"],
    }.items():  # fmt: skip
        assert at(samples, name, chain="p000000") == value
    assert at(samples, "holder_newest_step", chain="p000000", holder="b") == 20
    assert at(samples, "bytes", chain="p000000", place="ram") > 0
    assert at(samples, "drain_waiting_records", place="far") >= 40
    assert at(samples, "drain_lag_steps", place="far") >= 20
    assert at(samples, "failing", work="drain-far") == 1
    assert at(samples, "watermark_step") == 19
    assert at(samples, "memory_limit_bytes") == agents["a"]["memory"]

    text = cli("status", here.url).stdout
    for word in ("Tiers", "Agents", "Chains", "Drains", "p000000", "a 20, b 20", "failpoint"):
        assert word in text
    block.unlink()
    session.flush(60.0)
    # Not at the flush: a base that the agent folded meanwhile may wait for a moment more.
    until(lambda: at(scrape(url), "drain_waiting_records", place="far") == 0, "all is drained")
    samples = scrape(url)
    assert at(samples, "drain_lag_seconds", place="far") == 0
    assert at(samples, "failing", work="drain-far") == 0
    assert at(samples, "drained_bytes_total", place="far") > 0
    session.close()

    other.kill()
    until(lambda: "b silent" in cli("status", here.url).stdout, "its death is seen")
    troubles = rows(here, "TroubleRow")
    assert any(row["tier"] == "agent b" for row in troubles)
    until(lambda: at(scrape(url), "exposed", chain="p000000") == 1, "it is exposed")
    assert at(scrape(url), "holders_live", chain="p000000") == 1
    (part,) = (row for row in rows(here, "ChainRow") if row["chain"] == "p000000")
    assert part["exposed"]
    here.kill()
    assert not rows(here, "AgentRow")
    assert {row["tier"] for row in rows(here, "TierRow")} >= {"zarr", "all"}


def test_scrapers_that_hang_harm_nobody(here: Node) -> None:
    session, toy = open_session(here.url, metrics="127.0.0.1:0"), make_toy()
    begin(session, toy, reference(0))
    url = here.status()["metrics"]
    address = (urlsplit(url).hostname, urlsplit(url).port)
    with ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(socket.create_connection(address))
            if number % 2:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            if number % 3 == 0:
                sock.sendall(b"\0" * 100)
        began = time.monotonic()
        assert at(scrape(url), "trainers") == 1
        train(session, toy, reference(0), 10)
        session.flush(30.0, far=False)
        assert session.status().stored == 10
        assert time.monotonic() - began < metrics.STALL_S + 30.0
        threads = len(list(Path(f"/proc/{here.pid()}/task").iterdir()))
        assert threads < 60
    until(lambda: at(scrape(url), "newest_step", chain="p000000") == 10, "numbers are fresh")
    session.close()


def test_what_is_asked_often_is_looked_up_seldom() -> None:
    looks = []

    def look() -> dict[str, object]:
        looks.append(time.monotonic())
        return {
            "run": RUN, "node": "a", "version": "", "boot": "", "term": "", "domain": "",
            "watermark": -1, "trainers": [], "memory": dict.fromkeys(metrics.MEMORY, 0),
            "chains": {}, "drains": {}, "peers": {}, "last_errors": {},
        }  # fmt: skip

    served = metrics.MetricsServer(Endpoint.parse("tls://127.0.0.1:0"), look)
    try:
        began = time.monotonic()
        for _ in range(50):
            urllib.request.urlopen(served.url, timeout=30).read()
        assert len(looks) <= 1 + (time.monotonic() - began) / metrics.FRESH_S
        with pytest.raises(OSError, match="405"):
            urllib.request.urlopen(served.url, data=b"x", timeout=30)
    finally:
        served.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(served.url, timeout=5)
