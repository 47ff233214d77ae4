"""A training script as torchrun starts it, on a node of a cluster or alone.

Called as ``python -m tests.cluster.worker FOLDER``. In the folder ``config.json`` says what to
train, ``gate`` up to which step (a number that the harness raises), ``faults.json`` what is to
happen to which rank at which restart. Each process writes a journal ``RESTART.RANK.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import adacheck_store as ada
from adacheck_store import restore, session
from adacheck_store.format.errors import AdaCheckError, TermError
from adacheck_store.trainer_hooks.ranks import find_group
from tests.ranks.worker import build, digest, evaluate, step, told, writes
from tests.waits import Gate


def crossed() -> int:
    """Bytes that have come in over this node's network: every interface but the loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, rest = line.partition(":")
        total += int(rest.split()[0]) if name.strip() != "lo" else 0
    return total


def die(*args: object) -> Any:
    """SIGKILL this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fault: str) -> None:
    """What is to happen: to be killed after the claim or while fetching, or to fail at that."""
    claim = session.claim_term

    def claimed(*args: Any) -> Any:
        claim(*args)
        die()

    def refuse(*args: object) -> Any:
        raise OSError("no bytes for you")

    if fault == "die claimed":
        session.claim_term = claimed  # type: ignore[assignment]
    if fault == "die fetching":
        restore.fetch_parts = die
    if fault == "fail fetching":
        restore.fetch_parts = refuse


class Worker:
    """One rank of one start."""

    def __init__(self, folder: Path, write: Any) -> None:
        self.folder, self.write = folder, write
        self.config = json.loads((folder / "config.json").read_text())
        self.rank, self.restart = int(os.environ["RANK"]), _restart()
        faults = json.loads((folder / "faults.json").read_text())
        self.fault = faults.get(f"{self.restart}.{self.rank}", "")
        self.training = build(
            self.config["kind"], self.rank, dist.get_world_size(), **self.config["sizes"]
        )

    def run(self) -> None:
        """Restore, and train to the end."""
        model, optimizer, schedule, _ = self.training
        agents = self.config["agents"]
        use = None if agents is None else ada.Agents(
            domain=os.environ["ADACHECK_NODE"], listen=os.environ["LISTEN"], **agents
        )  # fmt: skip
        given = {
            "run": self.config["run"],
            "store": self.config["store"],
            "agents": use,
            "group": find_group(silent_s=self.config.get("silent_s", 3.0)),
        }
        with ada.attach(model, optimizer, **given | self.config["given"]) as ckpt:
            ckpt.track(schedule=schedule)
            arm(self.fault)
            self.write(restoring=True)
            report = self._restore(ckpt)
            try:
                self._train(ckpt, report.step)
            except RuntimeError as error:
                if not self.config.get("zombie"):
                    raise
                self._go_on_alone(ckpt, error)
            self.write(final=ckpt.step, digest=digest(model, optimizer, schedule))

    def _restore(self, ckpt: Any) -> Any:
        state = self.training[:3]
        before, crossed_before = digest(*state), crossed()
        try:
            report = ckpt.restore()
        except (AdaCheckError, OSError) as error:
            touched = digest(*state) != before
            self.write(refused=str(error), error=type(error).__name__, touched=touched)
            raise
        self.write(
            **told(report, *state), bytes=report.tiers or {}, crossed=crossed() - crossed_before
        )
        return report

    def _train(self, ckpt: Any, done: int) -> None:
        model, optimizer, schedule, loader = self.training
        for number, batch in enumerate(ckpt.batches(loader), done + 1):
            if number > self.config["sizes"]["steps"]:
                break
            self._wait(ckpt, number)
            if self.fault == f"poisoned at {number}":
                die()
            loss = step(model, optimizer, schedule, batch)
            evaluate(model, number)
            try:
                assert ckpt.end_step() == number
            except SystemExit:
                self.write(stopped=number, digest=digest(model, optimizer, schedule))
                raise
            status = ckpt.status()
            self.write(step=number, loss=loss.hex(), stored=status.stored, drained=status.drained)
            if self.fault == f"die at {number}":
                die()
        ckpt.flush(60)

    def _wait(self, ckpt: Any, number: int) -> None:
        """Until the gate lets a step through; says when the step before is held by all holders."""
        gate, held, said = Gate(self.folder / "gate"), False, (-1, -1)
        while not gate.lets(number):
            status = ckpt.status()
            if (status.stored, status.drained) != said:
                said = (status.stored, status.drained)
                self.write(stored=status.stored, drained=status.drained)
            if not held and status.stored == number - 1:
                held = True
                self.write(held=number - 1)
            time.sleep(0.01)

    def _go_on_alone(self, ckpt: Any, error: Exception) -> None:
        """What no trainer should: without the others, on and on, until it is told to stop."""
        self.write(alone=str(error)[:200])
        model, optimizer = self.training[:2]
        try:
            while True:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                self.write(more=ckpt.end_step())
                time.sleep(0.05)
        except TermError as fenced:
            self.write(fenced=str(fenced))


def _restart() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def join() -> None:
    """Meet the other ranks over torchrun's store, each restart under names of its own.

    A torchrun with pinned node ranks keeps its store over restarts, and torch looks for the others
    where the dead have been.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"restart {_restart()}", store),
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip


def main(folder: Path) -> None:
    """Be a rank."""
    path = folder / f"{_restart()}.{os.environ['RANK']}.jsonl"
    with open(path, "w", encoding="utf-8") as journal:
        write = writes(journal)
        write(pid=os.getpid())
        join()
        worker = Worker(folder, write)
        warnings.simplefilter("error")
        worker.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
