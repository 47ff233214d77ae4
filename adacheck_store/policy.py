"""Policies of retention: which steps stay below a floor. Pure; what a step is like is given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from adacheck_store.format.canonical import from_json, to_json
from adacheck_store.format.errors import MalformedError, UnsupportedError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What the far tier keeps, of steps at which it has a base: all that any rule asks for.

    ``last`` bases with every step after the oldest of them, which is the floor. Below it single
    steps: the first one in every ``every`` steps; the first one in every ``every_s`` seconds, by
    when its base was made; the ``best_count`` with the smallest (or ``best_largest``) number at
    ``best``, a path such as ``metrics/loss`` into what `Checkpointer.track` keeps, on rank 0; and
    always the tagged ones. 0 or empty: no such rule.
    """

    last: int = 2
    every: int = 0
    every_s: float = 0.0
    best: str = ""
    best_count: int = 1
    best_largest: bool = False

    def __post_init__(self) -> None:
        for name, low in (("last", 1), ("every", 0), ("best_count", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise UsageError(f"{name}={value!r}", hint=f"an integer of at least {low}")
        if not isinstance(self.every_s, int | float) or not 0 <= self.every_s < float("inf"):
            raise UsageError(f"every_s={self.every_s!r}", hint="seconds, not negative")
        if not isinstance(self.best, str):
            raise UsageError(f"best={self.best!r:.100}", hint="a path such as metrics/loss")


def to_settings(last: int, rules: Retention | None) -> dict[str, Any]:
    """What a writer keeps, as its manifest says it: for who collects without rules of his own."""
    told: dict[str, Any] = {"keep_bases": last}
    if rules is not None:
        told["keep"] = to_json(dict(sorted(asdict(rules).items())))
    return told


def from_settings(settings: Mapping[str, Any]) -> tuple[int | None, Retention | None]:
    """The bases that a run's writer keeps, and its rules; None for what its manifest does not say.

    Raises `UnsupportedError` for rules that this program does not know.
    """
    last, told = settings.get("keep_bases"), settings.get("keep")
    rules = None
    if told is not None:
        try:
            given, known = from_json(told), {item.name for item in fields(Retention)}
            if not isinstance(given, dict) or not given.keys() <= known:
                raise MalformedError(f"rules {given!r:.200}", rule="manifest")
            rules = Retention(**given)
        except (MalformedError, UsageError) as error:
            raise UnsupportedError(
                f"what the run's writer keeps is not understood: {error.message}",
                hint="upgrade adacheck-store, or name what is to stay: --last and the like",
            ) from error
    return last if type(last) is int and last > 0 else None, rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What policies ask of a step: when its base was made (``time_s``), and its number.

    None where nobody can tell.
    """

    step: int
    time_s: float | None = None
    value: float | None = None


def chosen(retention: Retention, steps: Iterable[Facts]) -> dict[int, tuple[str, ...]]:
    """Steps that the rules for single steps keep, with the names of these rules.

    The first of a stretch is taken, not its last: so a step that is kept stays so when later ones
    come (but for the best ones, which better ones displace).
    """
    known = sorted(steps, key=lambda facts: facts.step)
    found: dict[int, tuple[str, ...]] = {}
    rules: list[tuple[str, Sequence[int]]] = []
    if retention.every:
        every = retention.every
        rules.append(("every", _first_of(known, lambda facts: facts.step // every)))
    if retention.every_s:
        dated = [facts for facts in known if facts.time_s is not None]
        rules.append(
            ("every_s", _first_of(dated, lambda facts: (facts.time_s or 0) // retention.every_s))
        )
    if retention.best:
        sign = -1.0 if retention.best_largest else 1.0
        rated = [(sign * facts.value, facts.step) for facts in known
                 if facts.value is not None and facts.value == facts.value]  # fmt: skip
        rules.append(("best", [step for _, step in sorted(rated)[: retention.best_count]]))
    for rule, kept in rules:
        for step in kept:
            found[step] = (*found.get(step, ()), rule)
    return dict(sorted(found.items()))


def _first_of(steps: Sequence[Facts], stretch: Callable[[Facts], Hashable]) -> list[int]:
    first: dict[Hashable, int] = {}
    for facts in steps:
        first.setdefault(stretch(facts), facts.step)
    return sorted(first.values())
