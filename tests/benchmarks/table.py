"""The paper's table: bytes of a checkpoint by ways of saving, for its settings; planned.

What is not public is assumed: dimensions of GPT-1.4B, GPT-7B and GPT-MoE (made to have as many
parameters), DeepSeek-V2-Lite without its shared experts and low-rank attention, nodes of eight,
MiCS over one node, experts dealt to eight groups, and for the planner's output operators that are
each copied, sharded, sharded within a node, or under ZeRO-1 in turn. ``whole``: every rank keeps
all that it holds, half parameters, masters and two moments, as CheckFreq does on disk and GEMINI in
memory: the paper has one range of ratios for both. ``offline``: each state once. ``online``: its
gradient once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from adacheck_store.redundancy.assign import Topology, assign
from adacheck_store.redundancy.states import State
from adacheck_store.tools.plan_models import Model, from_dimensions, model
from adacheck_store.tools.plan_strategy import Placed, Strategy, items, merged, place
from adacheck_store.tools.plan_survival import survivals
from adacheck_store.tools.plan_topology import Cluster

from .rows import Row

ITEMS = items("mixed", "lossless")
NODE = 8
CLUSTERS = {"32 x A800": 32, "128 x 3090": 128}
MICS, EXPERTS = Strategy(kind="hsdp", shard=NODE), Strategy(kind="ep-zero1", ep=8)
ZERO1, ZERO3 = Strategy(kind="zero1"), Strategy(kind="zero3")
AUTO = (Strategy(kind="ddp"), ZERO3, MICS, ZERO1)
SETTINGS: dict[str, tuple[str, Sequence[Strategy]]] = {
    "LLaMA-7B, ZeRO-1": ("llama-7b", [ZERO1]), "LLaMA-7B, MiCS": ("llama-7b", [MICS]),
    "LLaMA-30B, ZeRO-3": ("llama-30b", [ZERO3]), "LLaMA-30B, MiCS": ("llama-30b", [MICS]),
    "GPT-1.4B, ZeRO-1": ("gpt-1.4b", [ZERO1]), "GPT-1.4B, auto-generated": ("gpt-1.4b", AUTO),
    "GPT-7B, ZeRO-3": ("gpt-7b", [ZERO3]), "GPT-7B, auto-generated": ("gpt-7b", AUTO),
    "DeepSeek-V2-Lite, EP+ZeRO-1": ("deepseek-v2-lite", [EXPERTS]),
    "GPT-MoE, EP+ZeRO-1": ("gpt-moe", [EXPERTS]),
}  # fmt: skip
ASSUMED = {
    "gpt-1.4b": {"family": "gpt2", "layers": 26, "hidden": 2048, "vocab": 50257, "positions": 2048},
    "gpt-7b": {"family": "gpt2", "layers": 32, "hidden": 4096, "vocab": 50257, "positions": 2048},
    "deepseek-v2-lite": {
        "family": "mixtral", "layers": 26, "hidden": 2048, "inner": 1408, "heads": 16,
        "kv_heads": 16, "vocab": 102_400, "experts": 64,
    },
    "gpt-moe": {
        "family": "mixtral", "layers": 24, "hidden": 1024, "inner": 4096, "heads": 16,
        "kv_heads": 16, "vocab": 50257, "experts": 32,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one checkpoint in all."""

    whole: int
    offline: int
    online: int


def placed(of: Model, strategies: Sequence[Strategy], world: int) -> Iterator[Placed]:
    """A model whose tensors are treated in these ways in turn."""
    for at, strategy in enumerate(strategies):
        mine = replace(of, tensors=of.tensors[at :: len(strategies)])
        yield from place(mine, strategy, world)


def sizes(found: Iterable[Placed], topology: Topology) -> Sizes:
    """What these ways keep."""
    states: tuple[State, ...] = tuple(merged(found, ITEMS))
    params = {(state.param, state.name): 0 for state in states}
    for state in states:
        params[state.param, state.name] += state.param_bytes
    optimizers = [(len(state.optimizer), state.optimizer_bytes) for state in states]
    parts = assign(states, topology).parts
    return Sizes(
        whole=sum(len(ranks) * nbytes for (ranks, _), nbytes in params.items())
        + sum(copies * nbytes for copies, nbytes in optimizers),
        offline=sum(s.nbytes for part in parts for s in part.states),
        online=sum(part.step_bytes(ITEMS.gradient) for part in parts),
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """A row for each setting, and the recovery probability of pairs."""
    ratios = []
    for where, world in CLUSTERS.items():
        cluster = Cluster(
            nodes=world // NODE, ranks_per_node=NODE, step_s=1, network_gbit_s=1, disk_gb_s=1,
            object_gb_s=1, memory_gib=1, disk_gib=1, cores=1, node_failures_per_day=1,
        )  # fmt: skip
        for name, (known, strategies) in SETTINGS.items():
            of = from_dimensions(known, ASSUMED[known]) if known in ASSUMED else model(known)
            found = sizes(placed(of, strategies, world), cluster.topology())
            ratios.append((found.whole / found.offline, found.offline / found.online))
            told = (found.whole, found.offline, found.online)
            yield Row(
                f"{where}: {name}", f"{found.whole / found.online:.2f} x", "", None,
                "whole (CheckFreq, GEMINI) {:.1f}, offline {:.1f}, online too {:.1f} GB".format(
                    *(each / 1e9 for each in told)
                ),
            )  # fmt: skip
    whole = [offline * online for offline, online in ratios]
    for what, published, values in (
        ("in all", "6.00 to 896", whole), ("offline", "1.30 to 240", [r for r, _ in ratios]),
        ("online, further", "up to 7.09", [r for _, r in ratios]),
    ):  # fmt: skip
        yield Row(
            f"whole / ours, {what}", f"{min(values):.2f} to {max(values):.2f}", "", None,
            f"published {published}",
        )  # fmt: skip
    names = [f"n{number:03}" for number in range(128)]
    pairs = [frozenset(names[at : at + 2]) for at in range(0, 128, 2)]
    exact = survivals(names, pairs, 4)
    assert exact is not None
    yield Row(
        "pairs, 128 nodes, 4 fail: all is recovered", f"{exact[4]:.2%}", "95.29 %",
        round(exact[4], 4) == 0.9529, "published 95.3 %",
    )  # fmt: skip
