"""A cluster: nodes of a network with an agent each, and starts of torchrun on some of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adacheck_store.store import open_store
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from tests.agent.kit import Node, free_port
from tests.agent.trainer import MEMORY, RUN
from tests.cluster.lender import Lender
from tests.cluster.network import Network
from tests.ranks.worker import check_rows, rows_of
from tests.waits import Gate, until

GIVEN = {"base_every": 6, "object_lag": 8, "window": 2, "max_deaths": 0}
"""Settings of a run that keep it short; all else is as it comes."""

Reference = list[dict[int, tuple[str, str]]]


class Host(Node):
    """A node with an address of its own."""

    def __init__(
        self, folder: Path, name: str, network: Network, number: int, lender: Lender | None
    ) -> None:
        super().__init__(folder, name)
        self.lender = lender
        network.add(number)
        self.network, self.number = network, number
        self.address = network.address(number)
        self.prefix = network.on(number)

    @property
    def env(self) -> dict[str, str]:
        """What its processes are started with."""
        found = super().env
        found |= {"LISTEN": f"{self.address}:0", "GLOO_SOCKET_IFNAME": self.network.interface}
        return found

    def pids(self, *, agents: bool = False) -> list[int]:
        """Processes that run on it; the agents, or all else."""
        mark = f"ADACHECK_RUNTIME={self.runtime}".encode()
        found = [] if agents or self.lender is None else self.lender.pids(self.name)
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                told = Path(entry.path, "environ").read_bytes().split(b"\0")
                words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                if mark in told and (b"agent" in words and b"adacheck_store" in words) == agents:
                    found.append(int(entry.name))
        return found

    def signal(self, number: int, *, agents: bool = False) -> None:
        """Send a signal to all that runs on it, or to its agents."""
        for pid in self.pids(agents=agents):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop_training(self) -> None:
        """SIGKILL all but the agents, as a scheduler ends a job."""
        until(lambda: self.signal(signal.SIGKILL) or not self.pids(), "its processes are dead")

    def kill_agent(self) -> None:
        """SIGKILL the agents: the memory is lost, the disk is not."""
        until(
            lambda: self.signal(signal.SIGKILL, agents=True) or not self.pids(agents=True),
            "its agent is dead",
        )

    def lose(self) -> None:
        """Lose the node: cable, processes, memory and disk."""
        self.network.cut(self.number)
        self.stop_training()
        self.kill_agent()
        self.burn_disk()

    def end(self) -> None:
        """End everything."""
        self.signal(signal.SIGKILL)
        super().end()


class Cluster:
    """Nodes by name, one store, and the starts of one run."""

    def __init__(
        self, folder: Path, network: Network, kind: str, sizes: Mapping[str, int],
        reference: Reference, *, lent: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        self.folder, self.network, self.reference = folder, network, reference
        self.lender = Lender(str(folder / "lender"), self._inside) if lent else None
        self.hosts: dict[str, Host] = {}
        self.starts: list[Start] = []
        self.agents: list[int] = []
        self.config = {
            "kind": kind, "sizes": dict(sizes), "run": RUN,
            "store": f"file://{folder}/store", "agents": {"memory": MEMORY},
            "given": {**GIVEN, "k": 1},
        } | config  # fmt: skip

    def host(self, name: str) -> Host:
        """A node, made when it is first asked for."""
        if name not in self.hosts:
            self.hosts[name] = Host(
                self.folder, name, self.network, len(self.hosts) + 1, self.lender
            )  # fmt: skip
        return self.hosts[name]

    def _inside(self, name: str) -> tuple[int, bool] | None:
        return self.network.inside(self.hosts[name].number)

    def start(self, names: str, faults: Mapping[str, str] | None = None, **config: Any) -> Start:
        """Start torchrun on nodes, the first with rank 0; ``faults`` see `worker.arm`."""
        folder = self.folder / f"start{len(self.starts)}"
        hosts = [self.host(name) for name in names]
        made = Start(folder, hosts, self.reference, {**self.config, **config}, faults or {})
        self.starts.append(made)
        return made

    def pids(self, names: str) -> list[int]:
        """Of the nodes' agents."""
        return [self.host(name).pid() for name in names]

    def settle(self, names: str, step: int) -> None:
        """Wait until every holder among these agents can produce a step of every chain."""

        def settled() -> bool:
            chains = [
                chain for name in names for chain in self.host(name).status()["chains"].values()
            ]
            held = [each["newest"] for chain in chains for each in chain["holders"].values()]
            return bool(held) and min(held) >= step

        until(settled, f"all hold step {step}")

    @contextlib.contextmanager
    def tiers(self, *nodes: str) -> Iterator[list[Tier]]:
        """The far tier, and the LMDBs of some nodes whose agents are dead, to read."""
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(open_store(self.config["store"]))
            found = [store.far]
            for name in nodes:
                tier = LmdbTier(self.folder / "store/lmdb" / f"{name}.{RUN}", readonly=True)
                stack.callback(tier.close)
                found.append(tier)
            yield found

    def end(self) -> None:
        """End everything."""
        for host in self.hosts.values():
            host.end()
        if self.lender is not None:
            self.lender.end()
            self.lender = None


class Start:
    """One start of torchrun on some nodes, with the restarts that it makes by itself."""

    def __init__(
        self, folder: Path, hosts: Sequence[Host], reference: Reference,
        config: Mapping[str, Any], faults: Mapping[str, str],
    ) -> None:  # fmt: skip
        folder.mkdir()
        self.folder, self.hosts, self.reference = folder, hosts, reference
        self.ranks = len(reference)
        (folder / "config.json").write_text(json.dumps(config))
        self.gate = Gate(folder / "gate")
        self.gate.open(0)
        self.faults(faults)
        self.processes: list[Any] = []
        self._launch()

    def _launch(self) -> None:
        hosts, folder = self.hosts, self.folder
        port = free_port()
        lender = hosts[0].lender
        words = (
            ["tests.cluster.worker"] if lender is None else ["tests.cluster.lender", lender.path]
        )
        for number, host in enumerate(hosts):
            with open(folder / f"log{number}", "w") as log:
                run = host.run(
                    "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank",
                    str(number), "--nproc-per-node", str(self.ranks // len(hosts)),
                    "--max-restarts", "20", "--monitor-interval", "0.1", "--master-addr",
                    hosts[0].address, "--master-port", str(port), "-m", *words,
                    str(folder), stdout=log,
                )  # fmt: skip
            self.processes.append(run)

    def faults(self, faults: Mapping[str, str]) -> None:
        """Say what is to happen, by RESTART.RANK."""
        draft = self.folder / "faults.tmp"
        draft.write_text(json.dumps(faults))
        draft.replace(self.folder / "faults.json")

    def rows(self, restart: int, rank: int) -> list[dict[str, Any]]:
        """What a rank has told."""
        return rows_of(self.folder / f"{restart}.{rank}.jsonl")

    def row(self, restart: int, rank: int, name: str, value: Any = None) -> dict[str, Any] | None:
        """The first row of a name (and value), if it is there."""
        for row in self.rows(restart, rank):
            if name in row and value in (None, row[name]):
                return row
        return None

    def every(self, restart: int, name: str, value: Any = None) -> list[dict[str, Any]]:
        """That row of every rank, waited for."""
        return [self.one(restart, rank, name, value) for rank in range(self.ranks)]

    def one(self, restart: int, rank: int, name: str, value: Any = None) -> dict[str, Any]:
        """That row of a rank, waited for."""

        launcher = self.processes[rank * len(self.hosts) // self.ranks]

        def told() -> dict[str, Any] | None:
            found = self.row(restart, rank, name, value)
            if found is None and launcher.poll() is not None:
                found = self.row(restart, rank, name, value)
                assert found is not None, f"torchrun has ended: {self.log()}"
            return found

        try:
            return until(told, f"rank {rank}, restart {restart}: {name} {value or ''}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.log()}") from None

    def held(self, restart: int, step: int) -> None:
        """Let the ranks train up to a step, and wait until all holders have it."""
        self.gate.open(step)
        self.every(restart, "held", step)
        self.check(restart)

    def restored(self, restart: int) -> list[dict[str, Any]]:
        """What every rank has restored: one step, on all."""
        rows = self.every(restart, "restored")
        assert len({row["restored"] for row in rows}) == 1, rows
        self.check(restart)
        return rows

    def kill(self, restart: int, *ranks: int) -> None:
        """SIGKILL trainers (all, if none is named); torchrun lives."""
        for rank in ranks or range(self.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.one(restart, rank, "pid")["pid"], signal.SIGKILL)

    def end(self) -> None:
        """As a scheduler ends a job: SIGKILL to torchrun and its trainers, not to agents."""
        for host in self.hosts:
            host.stop_training()

    def finish(self, restart: int, step: int) -> None:
        """Let the ranks train to the end of the run; torchrun ends well, and every bit is right."""
        self.gate.open(step)
        rows = self.every(restart, "final", step)
        for process in self.processes:
            assert process.wait(60) == 0, self.log()
        assert [row["digest"] for row in rows] == [known[step][0] for known in self.reference]
        self.check(restart)

    def check(self, restart: int) -> None:
        """All that the ranks have told equals the uninterrupted run."""
        for rank, known in enumerate(self.reference):
            check_rows(known, self.rows(restart, rank))

    def log(self) -> str:
        """The last words of every torchrun."""
        return "\n".join(
            f"--- {host.name}\n" + (self.folder / f"log{number}").read_text()[-3000:]
            for number, host in enumerate(self.hosts)
        )
