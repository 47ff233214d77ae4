"""Every tool that writes is cut off, or refused once, at each request that it makes of S3.

Whatever it was at: nothing provable is lost, fsck finds nothing wrong, and run again it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.restore import restore_state
from adacheck_store.store import open_for_reading
from tests.s3.door import S3Door
from tests.s3.proxy import Fault, Proxy, Request, Script, at
from tests.s3.server import BUCKET, Server, server
from tests.tools.stores import RUN, cli, cli_json, train

pytestmark = pytest.mark.fault
END = 11
OTHER, OTHERS = "imported", torch.arange(5000.0)
"""A run that is taken in beside, and what its one tensor is."""
SETTINGS = {"base_every": 4, "object_lag": 3, "keep_bases": 100}
REFUSED = Fault("error", 403, "AccessDenied")


def dead(number: int) -> Script:
    """A script: a request is done, its reply is lost, and nothing goes through any more.

    To the store that is what a SIGKILL between two requests is.
    """

    def script(request: Request) -> Fault | None:
        if request.number < number:
            return None
        return Fault("lost") if request.number == number else REFUSED

    return script


SCRIPTS: dict[str, Callable[[int], Script]] = {
    "dead": dead,
    "refused": lambda number: at(number, REFUSED),
    "lost": lambda number: at(number, Fault("lost")),
}


PASSING = {
    "reset": Fault("reset"), "503": Fault("error", 503, "SlowDown"),
    "500": Fault("error", 500, "InternalError"), "cut": Fault("cut"),
}  # fmt: skip
"""What passes: the client asks again, and whoever uses the tool sees nothing of it."""


class Bad:
    """A script: every ``every``-th request goes wrong, in ways that take turns; which has ``met``.

    A reply is cut where it has a body.
    """

    def __init__(self, every: int, first: int) -> None:
        self._every, self._first = every, first
        self.met: list[str] = []

    def __call__(self, request: Request) -> Fault | None:
        """What happens to a request."""
        if request.number % self._every != self._first:
            return None
        ways = [way for way in PASSING if way != "cut" or request.kind == "GET"]
        way = min(ways, key=lambda way: (self.met.count(way), way))
        self.met.append(way)
        return PASSING[way]


@dataclass(frozen=True)
class Act:
    """What is done to a store, whether it was done, and steps that must stay as they were.

    ``new``: a run that it begins. Cut off between the heads of its one step it has said that there
    is one, and fsck says that it is not whole.
    """

    run: Callable[[str], None]
    done: Callable[[str], bool]
    stay: tuple[int, ...]
    before: Callable[[str], None] = lambda url: None
    runs: tuple[str, ...] = (RUN,)
    new: str = ""


def verb(*arguments: object) -> Callable[[str], None]:
    """A verb of the command line; one that fails says so by an error of ours."""

    def run(url: str) -> None:
        result = cli(arguments[0], url, *arguments[1:])
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        assert "Traceback" not in result.output

    return run


def bases(url: str) -> set[int]:
    """Steps with a base."""
    with open_for_reading(url) as store:
        return {int(key.split("/base/")[1][:12]) for key in store.far.list("") if "/base/" in key}


def tagged(url: str) -> bool:
    """Whether the tag stands, for a step that can be produced."""
    rows = cli_json("tag", url)[1]["rows"]
    return [(row["name"], row["step"], row["base"]) for row in rows] == [("good", 7, True)]


def go_on(url: str) -> None:
    """Claim, restore, open a term, train one step more, drain; as a user starts it again."""
    try:
        train(url, END + 1, flush_s=5 if url.endswith("parallel=1") else 60, **SETTINGS)
    except AdaCheckError:
        return


def reached(url: str) -> bool:
    """Whether that step is there."""
    with open_for_reading(url) as store:
        return restore_state([store.far], RUN).step == END + 1


def flip(url: str) -> None:
    """Damage a base that nothing but itself has."""
    door = S3Door(url)
    name = next(n for n in door.names() if "/base/000000000004-" in n and n.endswith("/c/0"))
    data = bytearray(door.get(name))
    data[9] ^= 4
    door.put(name, bytes(data))


def take_in(url: str) -> None:
    """Import a file as a step of another run in the same prefix."""
    source = Path(os.environ["ADACHECK_CACHE"]).with_name("source.pt")
    torch.save({"model": {"w": OTHERS}}, source)
    verb("import", source, "--run", OTHER, "--step", 7)(url)


def taken_in(url: str) -> bool:
    """Whether S3 alone gives that step, and right."""
    with open_for_reading(url) as store:
        (part,) = restore_state([store.far], OTHER, step=7).parts.values()
    (array,) = part.arrays.values()
    return torch.equal(array[: len(OTHERS)], OTHERS)


ACTS = {
    "gc": Act(
        verb("gc", "--last", 1, "--every", 8, "--grace", 0, "--older", 0, "--apply"),
        lambda url: bases(url) == {0, 8}, (0, 8, 10, END),
    ),
    "tag": Act(verb("tag", "good", 7), tagged, (0, 4, 7, END)),
    "compact": Act(verb("compact", "--to", 7), lambda url: 7 in bases(url), (0, 4, 7, END)),
    "go on": Act(go_on, reached, (0, 4, 7, END)),
    "repair": Act(verb("fsck", "--repair"), lambda url: 4 not in bases(url), (0, 3, 7, END), flip),
    "import": Act(take_in, taken_in, (0, 4, 7, END), runs=(RUN, OTHER), new=OTHER),
}  # fmt: skip


def digests(url: str, steps: tuple[int, ...]) -> dict[int, bytes]:
    """Of some steps the bytes of all arrays, out of S3 alone."""
    found = {}
    with open_for_reading(url) as store:
        for step in steps:
            arrays = restore_state([store.far], RUN, step=step).parts["p000000"].arrays
            found[step] = b"".join(arrays[name].numpy().tobytes() for name in sorted(arrays))
    return found


class Bench:
    """A store in the bucket, copied for each try."""

    def __init__(self, real: Server, proxy: Proxy, url: str) -> None:
        self._real, self._proxy, self._url = real, proxy, url

    def copy(self) -> tuple[str, str]:
        """URLs of a fresh copy: straight, and through the proxy."""
        client = self._real.client()
        here = self._url.partition("?")[0].rpartition("/")[2]
        there = self._real.url().partition("?")[0].rpartition("/")[2]
        for key in self._real.keys(f"{here}/"):
            source = {"Bucket": BUCKET, "Key": key}
            client.copy_object(Bucket=BUCKET, CopySource=source, Key=there + key[len(here) :])
        through = self._real.url(there, self._proxy.endpoint, parallel="1")
        return self._real.url(there), through

    def count(self, act: Act) -> int:
        """How many requests it takes."""
        straight, through = self.copy()
        act.before(straight)
        self._proxy.restart()
        act.run(through)
        made = len(self._proxy.requests)
        assert act.done(straight)
        return made

    def pass_over(self, act: Act, script: Script, expected: dict[int, bytes]) -> None:
        """One try in which requests go wrong that are made again: it is done at once."""
        straight, through = self.copy()
        act.before(straight)
        self._proxy.restart(script)
        act.run(through)
        self._proxy.restart()
        assert act.done(straight)
        assert digests(straight, act.stay) == expected
        code, document = cli_json("fsck", straight)
        assert code == 0, document

    def play(self, act: Act, script: Script, expected: dict[int, bytes]) -> None:
        """One try, cut off or refused; what is there then, and when it was run again."""
        straight, through = self.copy()
        act.before(straight)
        self._proxy.restart(script)
        act.run(through)
        self._proxy.restart()
        assert digests(straight, act.stay) == expected
        rows = [row for row in cli_json("fsck", straight)[1]["rows"] if row["row"] == "Finding"]
        half = lambda row: row["kind"] == "gap" and row["run"] == act.new  # noqa: E731
        bad = [row for row in rows if row["severity"] == "damage" and not half(row)]
        assert act.before is flip or not bad, bad
        act.run(straight)
        assert act.done(straight)
        for name in act.runs:
            given = ("gc", straight, "--run", name, "--last", 100, "--older", 0, "--apply")
            assert cli(*given).exit_code == 0, name
        assert act.done(straight)
        assert digests(straight, act.stay) == expected
        code, document = cli_json("fsck", straight)
        assert code == 0, document
        assert not [row for row in document["rows"] if row.get("kind") == "unfinished"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run in the bucket, of which nothing was pruned; its machine is gone."""
    url, patch = server().url(), pytest.MonkeyPatch()
    patch.setenv("ADACHECK_CACHE", str(tmp_path_factory.mktemp("cache")))
    train(url, END, even=True, **SETTINGS)
    patch.undo()
    return url


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ACTS)
def test_cut_off_here_and_there(real: Server, proxy: Proxy, trained: str, name: str) -> None:
    """Each at one place, and the next one at another place in another way; all: see below."""
    act, bench = ACTS[name], Bench(real, proxy, trained)
    expected, made = digests(trained, act.stay), bench.count(act)
    assert made > 20
    part = list(ACTS).index(name) % len(SCRIPTS)
    bench.play(act, list(SCRIPTS.values())[part](made * (part + 1) // 4), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("turn", range(len(SCRIPTS)))
@pytest.mark.parametrize("name", ACTS)
def test_cut_off_everywhere(real: Server, proxy: Proxy, trained: str, name: str, turn: int) -> None:
    """At each request, in ways that take turns; in all three turns each request in each way."""
    act, bench, ways = ACTS[name], Bench(real, proxy, trained), list(SCRIPTS.items())
    expected, made = digests(trained, act.stay), bench.count(act)
    for number in range(made):
        how, script = ways[(number + turn) % len(ways)]
        try:
            bench.play(act, script(number), expected)
        except BaseException as error:
            error.add_note(f"{how} at request {number} of {made}")
            raise


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ACTS)
def test_what_passes_is_not_seen(real: Server, proxy: Proxy, trained: str, name: str) -> None:
    """Connections are reset, replies cut, the server is busy or fails, each now and then."""
    act, bench = ACTS[name], Bench(real, proxy, trained)
    bad = Bad(7, list(ACTS).index(name))
    bench.pass_over(act, bad, digests(trained, act.stay))
    assert set(bad.met) == PASSING.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ACTS)
def test_what_passes_anywhere(real: Server, proxy: Proxy, trained: str, name: str) -> None:
    """So at every request, some in each try."""
    act, bench = ACTS[name], Bench(real, proxy, trained)
    expected = digests(trained, act.stay)
    for every in (3, 4):  # so each meets several ways
        for first in range(every):
            bad = Bad(every, first)
            bench.pass_over(act, bad, expected)
            assert set(bad.met) == PASSING.keys()
