"""What an agent is told and cannot do: an error each that names what, and what to do."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import adacheck_store.agent.start as start
from adacheck_store.agent.crew import Agents
from adacheck_store.agent.node_tier import NodeTier
from adacheck_store.agent.options import AgentOptions
from adacheck_store.agent.start import ensure_agent
from adacheck_store.agent.upkeep import AgentUpkeep
from adacheck_store.format.errors import (
    TermError,
    TierReadOnlyError,
    TierUnavailableError,
    UnsupportedError,
    UsageError,
)
from adacheck_store.session import RunSession
from tests.agent.kit import Node
from tests.agent.trainer import MEMORY, RUN, open_session
from tests.core.kit import Journal, begin, make_toy, train
from tests.tools.stores import cli
from tests.waits import WAIT_S, until

NOBODY = 65534


def options(node: Node, **how: object) -> AgentOptions:
    """What an agent of a node is started with."""
    return AgentOptions(store=node.url, run=RUN, node=node.name, **{"memory": MEMORY, **how})


@pytest.fixture
def taken() -> Iterator[str]:
    """An address where somebody listens already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("option", ["listen", "metrics"])
def test_port_that_is_taken(here: Node, taken: str, option: str) -> None:
    said = f"(?=.*{taken})(?=.*in use).*name another one.*or 0 for any.*see its log"
    with pytest.raises(TierUnavailableError, match=said):
        ensure_agent(options(here, **{option: taken}))
    assert not here.alive()


@pytest.mark.parametrize("text", ["7070", "host", "host:", "host:x", "host:70000", "a b:1", "/x:1"])
@pytest.mark.parametrize("option", ["listen", "metrics"])
def test_address_that_does_not_parse(option: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{option} '{text}': not an address -> write HOST:PORT"):
        AgentOptions(store="/s", run=RUN, **{option: text})


@pytest.mark.parametrize("label", ["two words", "a#b", " ", "a\n", "a\x07"])
def test_label_that_does_not_parse(label: str) -> None:
    with pytest.raises(UsageError, match=r"not a label.*one word"):
        AgentOptions(store="/s", run=RUN, domain=label)


LABELS = {
    "a zone-1 b\n": "line 1: not a node and a label",
    "b zone-1\nb zone-2\n": "line 2: a node named twice",
    "b zone-1\n": "no line for this node, a",
    "\udcff": "cannot be read",
    "": "no line",
}


@pytest.mark.parametrize("text", LABELS)
def test_label_file_that_does_not_parse(here: Node, tmp_path: Path, text: str) -> None:
    file = tmp_path / "labels"
    file.write_bytes(os.fsencode(text))
    with pytest.raises(UsageError, match=LABELS[text]) as found:
        open_session(here.url, labels=file)
    assert found.value.place["path"] == str(file)
    assert found.value.hint
    told = cli("agent", here.url, "--run", RUN, "--labels", file)
    assert told.exit_code == 2
    assert LABELS[text] in told.stderr


PEERS = {
    "tls://h:1": r"peers='tls://h:1'",
    ("h:1",): r"peers\[0\]='h:1'",
    ("tls://h:1", "tls://h"): r"peers\[1\]='tls://h'",
    ("tls://h:0",): r"peers\[0\]",
    ("unix:/x",): r"peers\[0\]",
    (7,): r"peers\[0\]=7",
}


@pytest.mark.parametrize("peers", PEERS)
def test_peers_that_do_not_parse(peers: object) -> None:
    with pytest.raises(UsageError, match=PEERS[peers] + ".*tls://HOST:PORT"):
        Agents(peers=peers)


def test_label_and_file_of_labels() -> None:
    with pytest.raises(UsageError, match="give one of the two"):
        Agents(domain="a", labels="file")


def test_little_memory() -> None:
    with pytest.raises(UsageError, match=r"--memory 5: too little.*at least 400M"):
        AgentOptions(store="/s", run=RUN, memory=5)


def test_path_of_a_socket_that_is_too_long(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADACHECK_RUNTIME", "/tmp/" + "x" * 100)
    with pytest.raises(UsageError, match=r"path of 133 bytes, at most 107.*shorter folder"):
        ensure_agent(options(here))


def test_folder_open_to_others(here: Node) -> None:
    here.runtime.mkdir()
    here.runtime.chmod(0o755)
    with pytest.raises(TierReadOnlyError, match=r"open to others: mode 755.*ADACHECK_RUNTIME"):
        ensure_agent(options(here))


def test_agent_of_another_user(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    here.runtime.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(here.runtime, NOBODY, NOBODY)
    else:  # nobody else can give a folder away: then it is we who are another
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(
        TierReadOnlyError, match=r"of user \d+, and this process is of user 0.*ADACHECK_RUNTIME"
    ):
        ensure_agent(options(here))
    os.chown(here.runtime, 0, 0)


def test_versions_of_agent_and_trainer(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, about = ensure_agent(options(here))
    peer.close()
    monkeypatch.setattr(start, "__version__", "9.9")
    said = rf"agent of a \(pid {about['pid']}\) is adacheck-store {about['version']}.*process 9\.9"
    with pytest.raises(UnsupportedError, match=said + ".*--stop"):
        open_session(here.url)
    assert here.pid() == about["pid"]
    assert here.status()["version"] == about["version"]  # it can be asked, and stopped


def test_memory_for_one_part(here: Node) -> None:
    """What is said to be needed is enough, and a MiB less is not."""

    def begun(memory: int) -> RunSession:
        session, toy = open_session(here.url, memory=memory), make_toy([(1 << 21,)])
        try:
            begin(session, toy, Journal())
        except BaseException:
            session.close()
            here.kill()
            raise
        return session

    with pytest.raises(UsageError, match=r"\d+ MiB are needed.*more --memory") as found:
        begun(416 << 20)
    needed = int(str(found.value).split(" MiB are needed")[0].split()[-1])
    with pytest.raises(UsageError, match=f"{needed} MiB are needed"):
        begun((needed - 1) << 20)
    session = begun(needed << 20)
    memory = here.status()["memory"]
    assert memory["reserved"] <= memory["room"] < memory["reserved"] + (2 << 20)
    session.close()


@pytest.mark.parametrize("by", ["put", "sync", "news"])
def test_two_runs_of_one_name(here: Node, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The older one is refused at whatever it comes to first: a put that was about to be made, the
    acknowledgement of one that was made, or news of its agent."""
    first, toy = open_session(here.url), make_toy()
    begin(first, toy, Journal())
    train(first, toy, Journal(), 3)
    first.flush(30.0, far=False)
    begun, came = threading.Event(), list[str]()
    if by != "news":
        act = getattr(NodeTier, by)

        def late(*given: object) -> None:
            assert begun.wait(WAIT_S)
            came.append("taken")
            try:
                act(*given)
            except TermError:
                came[-1] = "refused"
                raise

        monkeypatch.setattr(NodeTier, by, late)
        monkeypatch.setattr(AgentUpkeep, "_take_news", lambda upkeep: None)
        train(first, toy, Journal(), 1)
    second = here.run("tests.agent.trainer", here.url, "5")
    assert re.match("ready [34]", second.stdout.readline())
    begun.set()
    said = rf"term t000002\S* .*pid {second.pid}\).*this process must stop"

    def refused() -> str:
        try:
            first.check()
        except TermError as error:
            return str(error)
        return ""

    assert re.search(said, until(refused, "the older one is refused"))
    assert came == ([] if by == "news" else ["refused"])
    first.close()
