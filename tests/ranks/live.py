"""A rank of a run in which one is killed and another process takes its place, others living on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.ranks.worker import STEPS, _join, build, digest, evaluate, step, told, writes

KILLED_AT = 13
"""Within the step after this one a rank is killed."""


def live_rank(out: str, rank: int, ranks: int, port: int, options: dict[str, Any]) -> None:
    """Train to the end; where a peer is gone, meet those that are left and its successor again.

    ``first``: the first attempt, 0, or that to which this process is a successor. ``waits``: the
    rank that says in mid-step that it may be killed. ``swaps``: nobody is; all leave the loop there
    and meet again numbered the other way round, each with the objects of its new number.
    """
    import torch
    import torch.distributed as dist

    from adacheck_store.trainer_hooks.attach import attach

    os.environ |= {"ADACHECK_NODE": "node-a", "LOCAL_RANK": str(rank), "ADACHECK_FAILPOINT": ""}
    live, reads = None, read_kinds()
    attempt = options["first"]
    _join(rank, ranks, port, f"live-{attempt}")
    model, optimizer, schedule, loader = build(options["kind"], rank, ranks)
    if attempt:  # what it was made with is of no use to anybody
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    with Path(out).open("a", encoding="utf-8") as journal:
        write = writes(journal)
        while True:
            try:
                with attach(
                    model, optimizer, run="e2e", store=options["store"], redundancy="auto",
                    base_every=6, object_lag=4, live=live, **options.get("given", {}),
                ) as ckpt:  # fmt: skip
                    ckpt.track(schedule=schedule)
                    reads.clear()
                    report = ckpt.restore()
                    write(**told(report, model, optimizer, schedule), read=sorted(reads),
                          live=report.certificate.live if report.certificate else "")  # fmt: skip
                    for number, batch in enumerate(ckpt.batches(loader), report.step + 1):
                        if number > STEPS:
                            break
                        if number == KILLED_AT + 1 and options.get("swaps") and not attempt:
                            ckpt.flush(60, far=False)
                            raise RuntimeError("nobody is where it was")
                        if number == KILLED_AT + 1 and rank == options["waits"] and not attempt:
                            ckpt.flush(60, far=False)
                            write(waits=number)
                            time.sleep(60)
                        loss = step(model, optimizer, schedule, batch)
                        evaluate(model, number)
                        ckpt.end_step()
                        write(step=number, loss=loss.hex())
                    write(final=STEPS, digest=digest(model, optimizer, schedule))
                    return
            except RuntimeError as error:
                write(ended=str(error)[:200])
                live = ckpt.live()
                write(lives=None if live is None else live.step)
            dist.destroy_process_group()
            attempt += 1
            rank = ranks - 1 - rank if options.get("swaps") else rank
            _join(rank, ranks, port, f"live-{attempt}")
            if options.get("swaps"):
                write(rank=rank)
                model, optimizer, schedule, loader = build(options["kind"], rank, ranks)
            else:
                model = torch.nn.parallel.DistributedDataParallel(model.module)


def read_kinds() -> set[str]:
    """The kinds of records of which blocks are read in this process, from here on."""
    from adacheck_store.fetch import Fetcher

    found: set[str] = set()
    verified = Fetcher._verified

    def noted(self: Any, ref: Any, *args: Any) -> memoryview:
        found.add(ref.kind)
        return verified(self, ref, *args)

    Fetcher._verified = noted
    return found
