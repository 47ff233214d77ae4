"""Mutated records: refused by an error of ours, or still what their id and digests say."""

import random

import pytest

from adacheck_store.format.canonical import dumps, loads
from adacheck_store.format.errors import AdaCheckError
from adacheck_store.format.ids import block_digests, record_id
from adacheck_store.format.record import encode_header
from tests.format.forge import NAMES, forge_text, golden_bytes, golden_head, read, sealed_of, spell

GOLDEN = {name: golden_bytes(name) for name in NAMES}
IDS = {sealed_of(name).id for name in NAMES}
TEXTS = {name: spell(golden_head(name)) for name in NAMES}


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip bits, overwrite, insert, delete or splice, once or several times."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 2, 8, 64, 1000)))
        match draw.randrange(6):
            case 0 if data:
                at = draw.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at] + draw.randbytes(end - at) + data[end:]
            case 2:
                data = data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]
            case 3:
                data = data[:at] + data[end:]
            case 4:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case _:
                other = GOLDEN[draw.choice(NAMES)]
                data = data[:at] + other[draw.randrange(len(other)) :]
    return data


def survives(data: bytes) -> bool:
    """Read a record; True if nothing was found wrong, and then its id and digests are right."""
    try:
        record, _ = read(data)
    except AdaCheckError:
        return False
    sealed = record.sealed
    assert record_id(sealed.raw) == sealed.id
    assert sealed.head.encode() == sealed.raw
    assert encode_header(sealed) == data[: len(encode_header(sealed))]
    for info in sealed.head.arrays:
        assert block_digests(record.arrays[info.name]) == info.digests
    return True


def run(count: int, seed: int) -> None:
    """Read ``count`` records mutated as files, of which none may pass as another."""
    draw = random.Random(seed)
    for _ in range(count):
        data = mutate(GOLDEN[draw.choice(NAMES)], draw)
        if survives(data):
            assert read(data)[0].sealed.id in IDS


def run_heads(count: int, seed: int) -> None:
    """Read ``count`` records whose head was mutated and its id made to fit."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(NAMES)
        raw = mutate(TEXTS[name].encode(), draw).decode("utf-8", "surrogateescape")
        survives(forge_text(name, raw))


def grow(draw: random.Random, depth: int = 0) -> object:
    """A random JSON value, often one that means something to a decoder."""
    words = ["", "x", "$t", "$f", "$d", "adamw.f32", "raw", "0" * 16, "p000000", "../x", "F32"]
    match draw.randrange(8 if depth < 3 else 5):
        case 0:
            return None
        case 1:
            return draw.choice([True, False])
        case 2 | 3:
            return draw.choice([0, 1, -1, 64, 2**53, draw.randrange(2**20)])
        case 4:
            return draw.choice(words)
        case 5 | 6:
            return [grow(draw, depth + 1) for _ in range(draw.randrange(4))]
        case _:
            return {draw.choice(words): grow(draw, depth + 1) for _ in range(draw.randrange(3))}


def run_values(count: int, seed: int) -> int:
    """Read ``count`` records in whose head a value was replaced; returns how many survived."""
    draw = random.Random(seed)
    survivors = 0
    for _ in range(count):
        name = draw.choice(NAMES)
        at = head = loads(TEXTS[name].encode())
        while at and isinstance(at, dict | list):
            key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or draw.random() < 0.15:
                at[key] = grow(draw)
                break
            at = at[key]
        survivors += survives(forge_text(name, dumps(head).decode()))
    return survivors


def test_mutants() -> None:
    """A few seconds' worth, the same in every run."""
    run(6_000, seed=1)
    run_heads(2_000, seed=2)
    survivors = run_values(2_000, seed=3)
    assert 20 < survivors < 1_000  # some values may be others, most may not


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_million_mutants(seed: int) -> None:
    """A million, in ten runs."""
    run(60_000, seed=100 + seed)
    run_heads(20_000, seed=200 + seed)
    run_values(20_000, seed=300 + seed)


def test_golden_records_survive() -> None:
    """The fuzzer's own judgement: what is not mutated passes."""
    assert all(survives(data) for data in GOLDEN.values())
    assert all(survives(forge_text(name, TEXTS[name])) for name in NAMES)
