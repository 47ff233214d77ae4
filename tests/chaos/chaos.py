"""One run of two ranks on two nodes, struck round after round; what is restored is held to truth.

A round: training goes on, strikes fall, what can heal heals, a scheduler kills what is left of the
trainers; fsck looks at the store; new trainers restore. Trainers are forked and started by the test
as a scheduler would (torchrun's part is tests/cluster); agents are started by the trainers.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.keys import part_name, rank_name
from adacheck_store.store import open_store
from adacheck_store.tools.findings import Finding, Provable
from adacheck_store.tools.fsck import fsck
from tests.chaos.strikes import NODES, Round, Strike
from tests.chaos.truth import Life, Promise, Truth
from tests.cluster.kit import Cluster, Host, Start
from tests.cluster.lender import be, enter
from tests.ranks.worker import _context
from tests.waits import until

HEALS_S = 60.0
"""Within this training is saved again once every fault has ended."""

LIVE_S = 1.0
"""So long at least a holder that stands still counts as live: it was heard of within 3 s."""

MORE_STEPS = 6
"""And within so many more steps."""

TOLD = {"hole", "gap", "base-missing"}
"""Damage that fsck may name: what a lost or full disk lacks. No byte is wrong, nothing forks."""


def _rendezvous(at: tuple[int, bool] | None, port: int) -> None:
    """Host the store where ranks meet, on a node of its own that nothing hits."""
    import torch.distributed as dist

    enter(at)
    server = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del server


def _waits(host: Host) -> int:
    """Records that wait for the node's disk or the far tier."""
    return sum(drain["waiting_records"] for drain in host.status()["drains"].values())


class Trainer:
    """A rank's process, as `Start` looks at those that it has started."""

    def __init__(self, wish: Mapping[str, Any], at: tuple[int, bool] | None) -> None:
        self.process = _context.Process(target=be, args=(wish, at), daemon=True)
        self.process.start()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(30)


class Attempt(Start):
    """One start of all ranks, each forked on its node; ``number`` is its name at the rendezvous."""

    def __init__(self, number: int, meet: tuple[str, int], *args: Any) -> None:
        self.number, self.meet = number, meet
        super().__init__(*args)

    def _launch(self) -> None:
        for rank, host in enumerate(self.hosts):
            log = self.folder / f"log{rank}"
            log.touch()
            env = host.env | {
                "RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0",
                "MASTER_ADDR": self.meet[0], "MASTER_PORT": str(self.meet[1]),
                "TORCHELASTIC_RESTART_COUNT": str(self.number),
            }  # fmt: skip
            wish = {"env": env, "folder": str(self.folder), "log": str(log)}
            self.processes.append(Trainer(wish, host.network.inside(host.number)))

    def end(self) -> None:
        """SIGKILL to all ranks."""
        for trainer in self.processes:
            trainer.kill()

    @property
    def alive(self) -> bool:
        """Whether all ranks are at it."""
        return all(trainer.poll() is None for trainer in self.processes)

    def least(self, name: str) -> int:
        """The highest number every rank has told under a name; -1 if one has told none."""
        return min(self.highest(name, rank) for rank in range(self.ranks))

    def highest(self, name: str, rank: int) -> int:
        """The highest number a rank has told under a name; -1 if none."""
        return max((row[name] for row in self.rows(self.number, rank) if name in row), default=-1)


class Chaos:
    """A run under chaos, from its first start to its last restore."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.truth = Truth()
        self.counts: Counter[str] = Counter()
        self.recoveries: list[float] = []
        self.lost: list[int] = []
        self.stopped: set[str] = set()
        self.full: dict[str, int] = {}
        meeting = cluster.host("m")
        self.meet = (meeting.address, meeting.port)
        self.rendezvous = _context.Process(
            target=_rendezvous, args=(cluster.network.inside(meeting.number), meeting.port),
            daemon=True,
        )  # fmt: skip
        self.rendezvous.start()
        self.attempt = self._start()
        assert self.attempt.restored(self.attempt.number)[0]["restored"] == 0

    @property
    def hosts(self) -> list[Host]:
        """The nodes with trainers, in the order of their ranks."""
        return [self.cluster.host(name) for name in NODES]

    def _start(self) -> Attempt:
        number = len(self.cluster.starts)
        folder = self.cluster.folder / f"start{number}"
        made = Attempt(
            number, self.meet, folder, self.hosts, self.cluster.reference, self.cluster.config, {}
        )
        self.cluster.starts.append(made)
        return made

    # Strikes ----------------------------------------------------------------------------------

    def round(self, plan: Round) -> str:
        """Carry a round out; raises `AssertionError` where a promise is not kept. Its story."""
        attempt = self.attempt
        gate = self.truth.trained = attempt.least("restored")
        attempt.gate.open(gate + plan.steps)
        self.truth.promises.clear()
        self.truth.acknowledged = gate
        target, told = gate, []
        for strike in plan.strikes:
            target += strike.steps
            self._reach(target)
            time.sleep(strike.pause_s)
            self._note()
            if self._strike(strike):
                self.counts[strike.kind] += 1
                told.append(f"{strike.kind} {strike.node}")
        if self.stopped or self.full or "cut link" in {strike.kind for strike in plan.strikes}:
            time.sleep(plan.lasts_s)
        self._heal()
        if plan.heals and attempt.alive:
            self._saved_again()
            told.append("saved again")
        self._note()
        attempt.end()
        attempt.check(attempt.number)
        return f"{', '.join(told) or 'nothing left to hit'}; {self._recover()}"

    def _reach(self, step: int) -> None:
        """Wait until a step is trained, or cannot be: somebody is dead, or waits for the dead."""
        end = time.monotonic() + 4.0
        while self.attempt.alive and self.attempt.least("step") < step and time.monotonic() < end:
            time.sleep(0.01)

    def _strike(self, strike: Strike) -> bool:
        """Let a fault happen; False where there is nothing left for it to hit."""
        host = self.cluster.host(strike.node)
        what = strike.kind.split()[1]
        trainers = {
            "trainers": self.attempt.processes, "all": self.attempt.processes,
            "trainer": [self.attempt.processes[NODES.index(strike.node)]],
            "node": [self.attempt.processes[NODES.index(strike.node)]],
        }.get(what, [])  # fmt: skip
        agents = {"agents": self.hosts, "all": self.hosts, "agent": [host], "node": [host]}
        hosts = agents.get(what, [])
        if strike.kind == "cut link":
            self.cluster.network.cut(host.number)
            return self.cluster.network.counts
        if strike.kind == "full disk":
            return self._fill(host)
        hit = any(trainer.poll() is None for trainer in trainers)
        hit = hit or any(each.pids(agents=True) for each in hosts)
        if strike.kind == "stop agent":
            whole = self.attempt.alive and list(self._holders()) == [""] * 8
            host.signal(signal.SIGSTOP, agents=True)
            self.stopped.add(host.name)
            if whole:
                self._nobody_is_left_out()
                self.counts["acknowledgements watched"] += 1
            return hit
        for trainer in trainers:
            trainer.kill()
        for each in hosts:
            each.kill_agent()
            self.stopped.discard(each.name)
        if strike.kind in ("empty agent", "lose node"):
            host.burn_disk()
        return hit

    def _nobody_is_left_out(self) -> None:
        """While a holder that stands still counts as live, nothing new is acknowledged."""
        time.sleep(LIVE_S)
        owed = [text for text in self._holders() if text]
        assert not owed, f"acknowledged without a live holder: {owed}"

    def _holders(self) -> Iterable[str]:
        """Of every live holder of a rank's chains, as the rank's agent sees it, what it lacks.

        That is a step of which the trainer was told that all live holders have it.
        """
        for rank, host in enumerate(self.hosts):
            told = self.attempt.highest("stored", rank)
            status = self._status(host)
            chains = status["chains"] if status else {}
            for name in (part_name(rank), rank_name(rank)):
                for holder, seen in chains.get(name, {"holders": {}})["holders"].items():
                    if seen["live"]:
                        lacks = seen["newest"] < told
                        yield f"{holder} lacks {name} at {told}: {seen}" if lacks else ""

    def _fill(self, host: Host) -> bool:
        """From now on no file of the node's agent can be written to."""
        for pid in host.pids(agents=True):
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
                self.full[host.name] = pid
        return host.name in self.full

    def _heal(self) -> None:
        """End every fault that lasts."""
        for host in self.hosts:
            self.cluster.network.mend(host.number)
            host.signal(signal.SIGCONT, agents=True)
        for pid in self.full.values():
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        self.full.clear()
        self.stopped.clear()

    def _saved_again(self) -> int:
        """Agents come back, and within some steps what training does is acknowledged again.

        Where both agents are new it takes a captured base, and so steps: a gap closes with one.
        Returns the step that training may go to.
        """
        attempt = self.attempt
        until(
            lambda: all(map(self._status, self.hosts)) or not attempt.alive, "agents run", HEALS_S
        )
        first = max(attempt.least("restored"), attempt.least("step")) + 1
        for number, step in enumerate(range(first, first + MORE_STEPS)):
            attempt.gate.open(step)  # pauses between captured bases grow, where they fail
            end = time.monotonic() + (2.0**number if number < MORE_STEPS - 1 else HEALS_S)
            while attempt.least("stored") < first and time.monotonic() < end and attempt.alive:
                time.sleep(0.05)
        saved = attempt.least("stored")
        assert saved >= first or not attempt.alive, f"{saved} of {first}: {attempt.log()}"
        return step

    # Truth ------------------------------------------------------------------------------------

    def _note(self) -> None:
        """What trainers have been told by now, and what agents say that they can produce."""
        truth, attempt = self.truth, self.attempt
        stored = attempt.least("stored")
        truth.trained = max(truth.trained, attempt.least("step"))
        truth.drained = max(truth.drained, self._drained())
        truth.acknowledged = max(truth.acknowledged, stored)
        claims = dict(self._claims())
        truth.promises.append(Promise(stored, claims))

    def _drained(self) -> int:
        """The newest step that each rank was told is drained: it, or one below it on no gap's span.

        A rank that closed a gap is told of the step after it, and the far tier has none before.
        """
        steps: list[set[int]] = []
        for rank, host in enumerate(self.hosts):
            told, status = self.attempt.highest("drained", rank), self._status(host)
            chain = status["chains"].get(part_name(rank)) if status else None
            spans = chain["drained"] if chain else []
            steps.append({
                step for first, last in spans for step in range(first, last + 1) if step <= told
            })  # fmt: skip
        return max(set.intersection(*steps), default=-1)

    def _claims(self) -> Iterable[tuple[Life, Mapping[str, int]]]:
        for host in self.hosts:
            status = self._status(host)
            if status is not None:
                chains = status["chains"].items()
                yield (
                    (host.name, status["boot"]),
                    {name: chain["newest_step"] for name, chain in chains},
                )

    def _status(self, host: Host) -> dict[str, Any] | None:
        if host.name in self.stopped:
            return None
        try:
            return host.status()
        except (AssertionError, AdaCheckError):  # it is dead, or it is just being born
            return None

    def _recover(self) -> str:
        """Start anew, and hold what is restored to the promises."""
        truth = self.truth
        lives = {
            (host.name, status["boot"]) for host in self.hosts if (status := self._status(host))
        }
        provable = self.check()
        began = time.monotonic()
        self.attempt = self._start()
        rows = self.attempt.restored(self.attempt.number)
        self.recoveries.append(time.monotonic() - began)
        step, least = rows[0]["restored"], truth.least(lives)
        told = (
            f"trained {truth.trained}, acknowledged {truth.acknowledged}, drained {truth.drained}, "
            f"at least {least}, disks prove {provable}, restored {step} in "
            f"{self.recoveries[-1]:.1f} s; agents {sorted(name for name, _ in lives)} survived"
        )
        assert step >= least, f"an acknowledged step is lost: {told}; {rows[0]['reasons']}"
        assert step >= provable, f"fsck proves what is not restored: {told}; {rows[0]['reasons']}"
        if not lives:
            assert step == provable, f"fsck did not prove what is restored: {told}"
        self.lost.append(max(0, truth.trained - step))
        return told

    def check(self) -> int:
        """Run fsck; the newest step that it proves. No byte may be wrong, nothing forked."""
        with open_store(self.cluster.config["store"]) as store:
            items = list(fsck(store))
        damage = [item for item in items if isinstance(item, Finding) and item.severity == "damage"]
        wrong = [item for item in damage if item.kind not in TOLD]
        assert not wrong, wrong
        self.counts["fsck clean" if not damage else "fsck names a loss"] += 1
        found = [item.newest for item in items if isinstance(item, Provable) and item.tier == "all"]
        return max((newest for newest in found if newest is not None), default=-1)

    def finish(self) -> str:
        """Drain all, lose all but the far tier, and restore that."""
        step = self._saved_again()
        until(lambda: self.attempt.least("stored") >= step, "all is saved", HEALS_S)
        self.attempt.check(self.attempt.number)
        for host in self.hosts:
            host.ask("flush", hurry=True)
        until(lambda: not any(map(_waits, self.hosts)), "all is drained")
        self.truth.drained = self.truth.trained = step
        self.attempt.end()
        for host in self.hosts:
            host.kill_agent()
            host.burn_disk()
        told = self._recover()
        self.attempt.end()
        return told

    def end(self) -> None:
        """End the ranks and their rendezvous."""
        self.attempt.end()
        self.rendezvous.kill()
        self.rendezvous.join(10)
