"""Keys: one grammar, and names in the order of their numbers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.format import keys
from adacheck_store.format.errors import AdaCheckError, MalformedError, NameRefusedError
from adacheck_store.format.head import check_key
from adacheck_store.format.keys import Key, Term, parse_key
from tests.format.forge import NAMES, sealed_of

RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
STEPS = st.integers(0, keys.MAX_STEP)
NUMBERS = st.integers(0, keys.MAX_NUMBER)
NONCES = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
TERMS = st.builds(lambda number, nonce: str(Term(number, nonce)), NUMBERS, NONCES)
PARTS = NUMBERS.map(keys.part_name)
RANKS = NUMBERS.map(keys.rank_name)
IDS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
KEYS = st.one_of(
    st.builds(keys.log_key, RUNS, STEPS),
    st.builds(keys.layout_key, RUNS, IDS),
    st.builds(keys.manifest_key, RUNS, TERMS, STEPS),
    st.builds(keys.base_key, RUNS, TERMS, PARTS, STEPS, NONCES),
    st.builds(keys.delta_key, RUNS, TERMS, PARTS, STEPS),
    st.builds(keys.extra_key, RUNS, TERMS, RANKS, STEPS),
    st.builds(
        lambda run, term, part, steps, token: keys.pack_key(run, term, part, *sorted(steps), token),
        RUNS, TERMS, PARTS | RANKS, st.tuples(STEPS, STEPS), NONCES,
    ),
)  # fmt: skip
RUN, TERM = "run", "t000001-00112233445566aa"


@given(KEYS)
def test_round_trip(key: Key) -> None:
    """A name parses into the key that it names."""
    assert parse_key(str(key)) == key
    assert keys.is_key(str(key))


@given(st.lists(STEPS, unique=True))
def test_steps_sort_as_numbers(steps: list[int]) -> None:
    """The order of names is the order of steps."""
    for make in (
        lambda step: keys.delta_key(RUN, TERM, "p000000", step),
        lambda step: keys.extra_key(RUN, TERM, "r000000", step),
        lambda step: keys.base_key(RUN, TERM, "p000000", step),
        lambda step: keys.pack_key(RUN, TERM, "p000000", step, keys.MAX_STEP),
        lambda step: keys.manifest_key(RUN, TERM, step),
        lambda step: keys.log_key(RUN, step),
    ):
        names = sorted(str(make(step)) for step in steps)
        assert [parse_key(name).step for name in names] == sorted(steps)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, STEPS), unique=True))
def test_terms_and_parts_sort_as_numbers(places: list[tuple[int, int, int]]) -> None:
    """Within a run, names sort by term, then part, then step."""
    names = {
        str(keys.delta_key(RUN, str(Term(t, "0" * 16)), keys.part_name(p), s)): (t, p, s)
        for t, p, s in places
    }
    assert [names[name] for name in sorted(names)] == sorted(places)


@given(st.text() | KEYS.map(str).flatmap(lambda name: st.sampled_from(
    [name[:-1], name + "0", name + "/", name + "\n", "/" + name, name.replace("/", "//"),
     name.upper(), "../" + name, name.replace("/", "/../", 1), name.replace("0", "٠")]
)))  # fmt: skip
def test_a_name_is_a_key_or_refused(name: str) -> None:
    """What parses is spelled the same again; all else is malformed."""
    if keys.is_key(name):
        assert str(parse_key(name)) == name
    else:
        with pytest.raises(MalformedError) as caught:
            parse_key(name)
        assert caught.value.rule == "key"


BAD: dict[str, tuple[Any, type[AdaCheckError]]] = {
    "run climbs": (lambda: keys.log_key("../x", 0), NameRefusedError),
    "run absolute": (lambda: keys.log_key("/etc", 0), NameRefusedError),
    "run of two words": (lambda: keys.log_key("a/b", 0), NameRefusedError),
    "run empty": (lambda: keys.log_key("", 0), NameRefusedError),
    "run reserved": (lambda: keys.log_key("adacheck.json", 0), NameRefusedError),
    "run too long": (lambda: keys.log_key("r" * 129, 0), NameRefusedError),
    "run a number": (lambda: keys.log_key(7, 0), NameRefusedError),
    "step negative": (lambda: keys.log_key(RUN, -1), MalformedError),
    "step too large": (lambda: keys.log_key(RUN, 10**12), MalformedError),
    "layout no id": (lambda: keys.layout_key(RUN, "../x"), MalformedError),
    "term climbs": (lambda: keys.manifest_key(RUN, "..", 0), MalformedError),
    "part climbs": (lambda: keys.delta_key(RUN, TERM, "..", 0), MalformedError),
    "part a rank": (lambda: keys.delta_key(RUN, TERM, "r000000", 0), MalformedError),
    "rank a part": (lambda: keys.extra_key(RUN, TERM, "p000000", 0), MalformedError),
    "token climbs": (lambda: keys.base_key(RUN, TERM, "p000000", 0, "../x"), MalformedError),
    "pack backwards": (lambda: keys.pack_key(RUN, TERM, "p000000", 2, 1), MalformedError),
    "kind unknown": (lambda: Key(run=RUN, kind="commit"), MalformedError),
    "a field too many": (lambda: Key(run=RUN, kind="log", term=TERM), MalformedError),
    "part number": (lambda: keys.part_name(10**6), MalformedError),
    "rank number": (lambda: keys.rank_name(-1), MalformedError),
    "term number": (lambda: str(keys.new_term(10**6)), MalformedError),
    "term text": (lambda: Term.parse("t1-00"), MalformedError),
}


@pytest.mark.parametrize("case", BAD)
def test_key_outside_the_grammar_cannot_be_made(case: str) -> None:
    """No name that leaves its folder comes to be."""
    make, kind = BAD[case]
    with pytest.raises(kind):
        make()


def test_tokens_and_nonces_are_fresh() -> None:
    """Two puts of one base have two keys; two claims have two terms."""
    made = {str(keys.base_key(RUN, TERM, "p000000", 0)) for _ in range(100)}
    assert len(made) == 100
    term = keys.new_term(3)
    assert Term.parse(str(term)) == term != keys.new_term(3)


def key_of(name: str) -> Key:
    """The key under which a golden record belongs."""
    sealed = sealed_of(name)
    head = sealed.head
    match head.kind:
        case "claim" | "floor" | "tag":
            return keys.log_key(head.run, head.step or 0)
        case "layout":
            return keys.layout_key(head.run, sealed.id)
        case kind:
            token = "0" * 16 if kind == "base" else ""
            return Key(
                run=head.run, kind=kind, term=head.term, part=head.part, step=head.step or 0,
                name=token,
            )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_record_under_another_key_is_refused(name: str) -> None:
    """A record belongs under its own key and no other golden record's."""
    sealed = sealed_of(name)
    check_key(key_of(name), sealed.head, sealed.id)
    for other in NAMES:
        if key_of(other) != key_of(name):
            with pytest.raises(MalformedError) as caught:
                check_key(key_of(other), sealed.head, sealed.id)
            assert caught.value.rule == "swapped"
    with pytest.raises(MalformedError):
        check_key(keys.layout_key("golden-run", "0" * 64), sealed.head, sealed.id)
