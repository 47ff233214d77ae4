"""The command ``adacheck-store agent``: be an agent, ask one, stop one."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from adacheck_store.config import node_name
from adacheck_store.format.errors import TierError, TierUnavailableError

UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


class Bytes(click.ParamType[int]):
    """A number of bytes: 123, 64M, 8G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        if isinstance(value, int):
            return value
        text = str(value).upper().removesuffix("IB").removesuffix("B")
        shift = UNITS.get(text[-1:], 0)
        digits = text[:-1] if shift else text
        if not (digits.isascii() and digits.isdigit()):
            self.fail(f"{value!r} is no number of bytes: write 512M or 8G", param, ctx)
        return int(digits) << shift


@click.command("agent")
@click.argument("store_url")
@click.option("--run", required=True, help="The run it serves.")
@click.option("--node", default="", help="This node's name. Default: ADACHECK_NODE, machine id.")
@click.option("--cache", default="", metavar="FOLDER", help="Where the LMDB tiers lie.")
@click.option("--memory", type=Bytes(), default=0, help="What the process may take, all in all; "
              "default: half of what is available.")  # fmt: skip
@click.option("--listen", default="", metavar="HOST:PORT", help="For other nodes, by mutual TLS.")
@click.option("--idle-s", type=float, default=0.0, help="End after so long without a trainer, "
              "once all is drained (0: never).")  # fmt: skip
@click.option("--domain", default="", metavar="LABEL", help="What fails together with this node.")
@click.option("--labels", default="", metavar="FILE", help="A file with a line for each node, "
              "its name and its label; instead of --domain.")  # fmt: skip
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve Prometheus, by plain HTTP.")
@click.option("--drain-rate", type=Bytes(), default=0, help="At most so many bytes per second to "
              "the far tier.")  # fmt: skip
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="End within "
    "so long after SIGTERM, and say what is undrained (0: end when all is drained).",
)
@click.option("--status", "ask", is_flag=True, help="Print the living agent's state as JSON.")
@click.option("--stop", is_flag=True, help="Stop the living agent once all is drained.")
@click.option("--now", is_flag=True, help="With --stop: at once, whatever is undrained.")
@click.pass_context
def agent_verb(
    ctx: click.Context, /, store_url: str, run: str, node: str, labels: str, ask: bool, stop: bool,
    now: bool, **options: Any,
) -> None:  # fmt: skip
    """Hold the records of a run in this node's memory, fold and drain them, beside training."""
    from .options import AgentOptions, read_label
    from .process import main_of

    node = node or node_name()
    if ask or stop:
        ctx.exit(_call(store_url, run, node, stop=stop, now=now))
    if labels and options["domain"]:
        raise click.UsageError("--domain and --labels: give one of the two")
    if labels:
        options["domain"] = read_label(labels, node)
    ctx.exit(main_of(AgentOptions(store=store_url, run=run, node=node, **options)))


def _call(store_url: str, run: str, node: str, *, stop: bool, now: bool) -> int:
    from .messages import read_json
    from .places import alive, place_of
    from .start import find_agent

    found = find_agent(store_url, run, node)
    if found is None:
        raise TierUnavailableError(
            f"no agent of {node} lives for this run", run=run,
            hint="name the node it was started with: --node",
        )  # fmt: skip
    peer, about = found
    try:
        if not stop:
            click.echo(json.dumps(read_json(peer.call("status")[1]), ensure_ascii=False))
            return 0
        head, _ = peer.call("stop", {"now": now})
        click.echo(f"stopping agent of {node}, pid {about['pid']}; {head['behind']} records behind")
        while alive(place_of(store_url, run, node)):
            time.sleep(0.1)
    except TierError:
        if not stop:
            raise
    finally:
        peer.close()
    return 0
