"""A group: the ranks of one run, and the little they have to tell each other.

Ranks talk while a run is attached, restored and begun, and where its tensors change; other steps
need none of it. What is said is JSON, and of an error its class, text and place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from adacheck_store.format import canonical, errors, strict
from adacheck_store.format.errors import AdaCheckError, GroupError

T = TypeVar("T")

TEXT_MAX = 2000
"""Characters of an error's message or hint that are passed on."""


class Group(Protocol):
    """The ranks of a run, numbered ``0 .. size-1``; this process is ``rank``.

    All ranks make the same calls in the same order, each from one thread. A rank that does not
    come in time is named by the `GroupError` that all others get; then the group is of no more
    use. ``lost`` are the ranks that are known to have died.
    """

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def lost(self) -> Collection[int]:
        """Ranks that have died: nothing more will be heard of them."""
        ...

    def room(self, name: str) -> Group:
        """The same ranks in a room of that name: what fails there is of no consequence here."""
        ...

    def leave(self) -> None:
        """This rank comes to no further round: whoever waits for it fails at once."""
        ...

    def gather(self, data: bytes, timeout_s: float | None = None) -> Sequence[bytes]:
        """What every rank gave, in the order of ranks; ``timeout_s`` is another than the usual."""
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave; the others give None."""
        ...

    def exchange(self, messages: Sequence[bytes], timeout_s: float) -> Sequence[bytes]:
        """An all-to-all: takes what each rank is to get, gives what each rank has sent here."""
        ...


class SoloGroup:
    """The group of a run of one process."""

    rank = 0
    size = 1
    lost: Collection[int] = ()

    def room(self, name: str) -> Group:
        """This process."""
        return self

    def leave(self) -> None:
        """Nobody waits."""

    def gather(self, data: bytes, timeout_s: float | None = None) -> Sequence[bytes]:
        """What this process gave."""
        return [data]

    def broadcast(self, data: bytes | None) -> bytes:
        """What this process gave."""
        assert data is not None
        return data

    def exchange(self, messages: Sequence[bytes], timeout_s: float) -> Sequence[bytes]:
        """What this process gave."""
        return list(messages)


SOLO = SoloGroup()


def lead(
    group: Group, what: str, work: Callable[[], T], *,
    encode: Callable[[T], Any] = lambda value: value,
    decode: Callable[[Any], T] = lambda value: value,
) -> T:  # fmt: skip
    """What ``work`` gives on rank 0, on every rank; it is done there alone.

    If it raises, all ranks raise. ``encode`` makes JSON of the result, ``decode`` undoes that.
    """
    if group.size == 1:
        return work()
    if group.rank != 0:
        said = _read(group.broadcast(None), what, 0)
        if said["error"] is not None:
            raise _revived(said["error"], "rank 0")
        return decode(said["value"])
    try:
        value = work()
        message = _message(what, encode(value))
    except Exception as error:
        group.broadcast(_message(what, None, error))
        raise
    group.broadcast(message)
    return value


def share(
    group: Group, what: str, work: Callable[[], Any], *, timeout_s: float | None = None
) -> list[Any]:
    """Do ``work`` on every rank; gives what each of them got (JSON), in the order of ranks.

    Returns when all are done. If any raises, all raise: that rank its own error, the others
    one of its class that names the rank.
    """
    if group.size == 1:
        return [work()]
    failure: Exception | None = None
    try:
        message = _message(what, work())
    except Exception as error:
        failure = error
        message = _message(what, None, error)
    answers = [
        _read(data, what, rank) for rank, data in enumerate(group.gather(message, timeout_s))
    ]
    if failure is not None:
        raise failure
    failed = [rank for rank, said in enumerate(answers) if said["error"] is not None]
    if failed:
        raise _revived(answers[failed[0]]["error"], named(failed))
    return [said["value"] for said in answers]


def together(
    group: Group, what: str, work: Callable[[], T], *, timeout_s: float | None = None
) -> T:  # fmt: skip
    """Do ``work`` on every rank and return its own result once all have one; as `share`."""
    found: list[T] = []
    share(group, what, lambda: found.append(work()), timeout_s=timeout_s)
    return found[0]


def same(group: Group, what: str, values: Mapping[str, Any]) -> None:
    """Raise `GroupError` on all ranks unless every rank gives the same values."""
    mine = {name: repr(value) for name, value in values.items()}
    given = share(group, what, lambda: mine)
    wrong = []
    for name in dict.fromkeys(name for each in given for name in each):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(given):
            by_value.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            sides = ", ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items())
            wrong.append(f"{name} is {sides}")
    if wrong:
        raise GroupError(
            f"{what}: the ranks do not agree: {'; '.join(wrong)}",
            hint="start all ranks with the same arguments",
        )


def named(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _message(what: str, value: Any, error: Exception | None = None) -> bytes:
    told = None if error is None else _told(error)
    return canonical.dumps({"what": what, "value": value, "error": told})


def _told(error: Exception) -> dict[str, Any]:
    """An error as JSON: the nearest class of the tree that everyone knows."""
    if not isinstance(error, AdaCheckError):
        error = GroupError(f"{type(error).__name__}: {error}")
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    place = {name: value for name, value in error.place.items() if type(value) in (int, str)}
    return {
        "class": known.__name__, "message": _clean(error.message), "hint": _clean(error.hint),
        "place": {
            name: value if isinstance(value, int) else _clean(value)
            for name, value in place.items()
        },
    }  # fmt: skip


def _clean(text: str) -> str:
    return text[:TEXT_MAX].encode("utf-8", "replace").decode()


def _read(data: bytes, what: str, rank: int) -> Mapping[str, Any]:
    """A message of a rank; raises `GroupError` for one that means something else."""
    try:
        said = strict.fields(canonical.loads(data), "what", "value", "error")
    except (AdaCheckError, ValueError) as error:
        raise GroupError(f"what rank {rank} says cannot be read: {error}") from error
    if said["what"] != what:
        raise GroupError(
            f"rank {rank} is at {said['what']!r}, this rank at {what!r}",
            hint="all ranks must make the same calls in the same order",
        )
    return said


def _revived(told: Any, who: str) -> AdaCheckError:
    found = strict.fields(told, "class", "message", "hint", "place")
    cls = getattr(errors, strict.text(found["class"]), None)
    if not (isinstance(cls, type) and issubclass(cls, AdaCheckError)):
        cls = GroupError
    place = {name: found["place"][name] for name in errors.PLACES if name in found["place"]}
    error: AdaCheckError = cls(f"{who}: {found['message']}", hint=found["hint"], **place)
    return error
