"""The process of an agent: how it is started, what it outlives, when it ends, what is left."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from adacheck_store.agent import places
from adacheck_store.agent import process as module
from adacheck_store.agent.messages import read_json
from adacheck_store.agent.process import AgentOptions
from adacheck_store.agent.start import ensure_agent
from adacheck_store.restore import restore_state
from adacheck_store.store import open_store
from adacheck_store.tiers.endpoint import Endpoint
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.serve import Server
from tests.agent.kit import Node, Trainer
from tests.agent.trainer import MEMORY, RUN, reference
from tests.waits import until

STARTER = """
import sys, time
from adacheck_store.agent.process import AgentOptions
from adacheck_store.agent.start import ensure_agent
print("up", flush=True)
sys.stdin.readline()
peer, about = ensure_agent(AgentOptions(store=sys.argv[1], run="run", node="a", memory=512 << 20))
print(about["pid"], flush=True)
time.sleep(600)
"""


def options(node: Node, run: str = RUN, **how: object) -> AgentOptions:
    """What an agent of a node is started with."""
    return AgentOptions(store=node.url, run=run, node=node.name, **{"memory": MEMORY, **how})


def starter(node: Node) -> subprocess.Popen[str]:
    """A process that will start the node's agent when told to."""
    process = subprocess.Popen(
        [os.sys.executable, "-c", STARTER, node.url], env=node.env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    node.processes.append(process)
    assert process.stdout.readline() == "up\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    """Tell a starter to start."""
    process.stdin.write("\n")
    process.stdin.close()


def test_who_asks_at_once_learns_where_the_agent_is_reached(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers before its maker has it: whoever asks then waits for it."""
    place, said = places.place_of(here.url, RUN, here.name), []
    places.make(place)

    class Slow(Server):
        def __init__(self, *how: object, **more: object) -> None:
            super().__init__(*how, **more)
            asking.start()
            time.sleep(0.5)

    def ask() -> None:
        peer = Peer(place.socket, run=RUN)
        said.append(read_json(peer.call("who")[1])["endpoints"])
        peer.close()

    asking = threading.Thread(target=ask)
    monkeypatch.setattr(module, "Server", Slow)
    endpoints = [place.socket, Endpoint.parse("tls://127.0.0.1:0")]
    with contextlib.ExitStack() as stack:
        module._Agent(options(here), here.name, place, endpoints, MEMORY, stack)
        asking.join(30)
    assert [text.partition(":")[0] for text in said[0]] == ["unix", "tls"]


def test_own_session_descriptors_and_device(
    here: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A trainer's own, that no processor would give an agent which finds it out by itself.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2-OF-THE-TRAINER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        peer, about = ensure_agent(options(here))
    peer.close()
    pid = about["pid"]
    assert os.getsid(pid) == pid
    links = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    log = str(places.place_of(here.url, RUN, "a").log)
    assert (links["0"], links["1"], links["2"]) == ("/dev/null", log, log)
    assert not any("secret" in link or "pipe" in link for link in links.values())
    env = psutil.Process(pid).environ()
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["ATEN_CPU_CAPABILITY"] == "avx2-of-the-trainer"
    assert "agent of a for run run" in Path(log).read_text()
    assert os.stat(log).st_mode & 0o077 == 0


def test_of_two_starters_one_starts_it_and_it_outlives_both(here: Node) -> None:
    starters = [starter(here), starter(here)]
    for process in starters:
        go(process)
    pids = {process.stdout.readline() for process in starters}
    assert len(pids) == 1
    log = places.place_of(here.url, RUN, "a").log.read_text()
    assert log.count("agent of a") == 1
    assert "lives" not in log  # the other one has not even tried
    for process in starters:
        process.kill()
        process.wait(30)
    assert here.pid() == int(pids.pop())
    assert psutil.Process(here.pid()).ppid() != os.getpid()


def test_what_killed_agents_leave_is_reclaimed_at_start_and_nothing_else(here: Node) -> None:
    """Not what lives, of this or another store; not what belongs to another user."""
    found, place = {}, {}
    elsewhere = f"{here.url}-2"
    for run, url in {
        "dead": here.url, "dead-elsewhere": elsewhere, "foreign": here.url, "living": here.url,
        "living-elsewhere": elsewhere,
    }.items():  # fmt: skip
        peer, found[run] = ensure_agent(dataclasses.replace(options(here, run), store=url))
        peer.close()
        place[run] = places.place_of(url, run, "a")
    for run in ("dead", "dead-elsewhere", "foreign"):
        os.kill(found[run]["pid"], signal.SIGKILL)
        until(lambda run=run: not places.alive(place[run]), "it is dead")
        assert os.path.exists(place[run].socket.path)
        assert place[run].info.exists()
    if os.geteuid() == 0:  # only root can give a folder away; else it is one more of ours
        os.chown(place["foreign"].folder, 65534, 65534)
    before = {path: path.stat().st_mtime_ns for path in place["foreign"].folder.iterdir()}
    peer, _ = ensure_agent(options(here, "another"))
    peer.close()
    for run in ("dead", "dead-elsewhere"):
        assert not os.path.exists(place[run].socket.path)
        assert not place[run].info.exists()
        assert place[run].log.exists()  # for a day
    after = {path: path.stat().st_mtime_ns for path in place["foreign"].folder.iterdir()}
    assert (before == after) is (os.geteuid() == 0)
    for run in ("living", "living-elsewhere"):
        assert places.alive(place[run])
        assert place[run].read_info()["pid"] == found[run]["pid"]
        assert os.path.exists(place[run].socket.path)
    os.utime(place["dead"].log, (1, 1))
    assert place["dead"].folder in places.reclaim()
    assert not place["dead"].folder.exists()
    peer, about = ensure_agent(options(here, "living"))
    peer.close()
    assert about["pid"] == found["living"]["pid"]
    peer, about = ensure_agent(options(here, "dead"))  # over what was left
    peer.close()
    assert about["pid"] != found["dead"]["pid"]


def test_idle_agent_ends_when_all_is_drained(here: Node, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    agent = here.agent("--idle-s", "1", fail=f"local.rename.before=hang@{hangs}")
    place = places.place_of(here.url, RUN, "a")
    peer = Peer(place.socket, run=RUN)
    peer.call("who")  # connected, so that the agent waits until the trainer is there
    trainer = Trainer(here, 10)
    peer.close()
    trainer.reach(10)
    time.sleep(1.5)
    assert here.pid() == agent.pid  # the trainer is silent, and there
    trainer.kill()
    until(lambda: not here.status()["trainers"], "it is gone")
    time.sleep(1.5)
    assert here.pid() == agent.pid  # idle, and not all is drained
    hangs.unlink()
    assert agent.wait(60) == 0
    assert "all is drained: ending" in agent.stdout.read()
    assert not os.path.exists(place.socket.path)
    assert not place.info.exists()
    with open_store(here.url) as store:
        found = restore_state([store.far], RUN)
    reference(10).assert_same(found)
    assert found.step == 10


def test_sigterm_drains_and_a_second_one_does_not_wait(here: Node) -> None:
    agent = here.agent()
    trainer = Trainer(here, 20)
    trainer.reach(20)
    trainer.kill()
    agent.terminate()
    assert agent.wait(60) == 0
    assert "ended, all is drained" in agent.stdout.read()
    with open_store(here.url) as store:
        assert restore_state([store.far], RUN).step == 20
    agent = here.agent("--drain-rate", "100")
    trainer = Trainer(here, 40)
    trainer.reach(40)
    trainer.kill()
    agent.terminate()
    line = agent.stdout.readline()
    while "stopping when" not in line:
        assert line
        line = agent.stdout.readline()
    time.sleep(module.AGAIN_S + 0.1)
    agent.terminate()
    assert agent.wait(30) == 3
    assert "records undrained" in agent.stdout.read()


def test_second_agent_names_the_first(here: Node, nodes: Callable[[str], Node]) -> None:
    first = here.agent()
    second = here.run("adacheck_store", "agent", here.url, "--run", RUN, "--node", "a")
    assert second.wait(60) == 3
    assert f"lives (pid {first.pid})" in second.stdout.read()
    stop = here.run("adacheck_store", "agent", here.url, "--run", RUN, "--node", "a", "--stop")
    assert stop.wait(60) == 0
    assert first.wait(60) == 0


def test_what_a_trainer_that_died_has_left_is_folded(here: Node) -> None:
    """All that the watermark allows, before there is a restore."""
    trainer = Trainer(here, 5)
    trainer.reach(5)
    trainer.kill()

    def folded() -> bool:
        time.sleep(0.2)
        told = here.status()
        return told["chains"]["p000000"]["replica_step"] == told["watermark"] == 4

    until(folded, "all is folded")
