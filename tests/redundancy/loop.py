"""An all-to-all within this process: the rounds of all ranks, carried out in turn and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """What went through: bytes by rank, and how many rounds there were."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    rounds: int = 0

    @property
    def payload(self) -> int:
        """Bytes of all messages, those to oneself too."""
        return sum(self.sent)


def carry_all(all_rounds: Sequence[Any]) -> tuple[list[Any], Traffic]:
    """Results of the rounds of all ranks, in order, and their traffic."""
    size = len(all_rounds)
    traffic = Traffic([0] * size, [0] * size)
    results: list[Any] = [None] * size
    outgoing = [next(rounds) for rounds in all_rounds]
    while True:
        traffic.rounds += 1
        for rank, messages in enumerate(outgoing):
            assert len(messages) == size
            traffic.sent[rank] += sum(map(len, messages))
            for peer, message in enumerate(messages):
                traffic.received[peer] += len(message)
        incoming = [[outgoing[peer][rank] for peer in range(size)] for rank in range(size)]
        outgoing = []
        for rank, rounds in enumerate(all_rounds):
            try:
                outgoing.append(rounds.send(incoming[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not outgoing:
            return results, traffic
        assert len(outgoing) == size, "ranks that do not have equally many rounds"
