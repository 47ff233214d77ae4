"""Each rule of a store is broken on purpose, and fsck names it; every invariant has a check."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import adacheck_store.format
from adacheck_store.arrays import byte_view
from adacheck_store.boundary import Link
from adacheck_store.catalog import read_catalog
from adacheck_store.format.bodies import ExtraBody
from adacheck_store.format.canonical import ArrayRef
from adacheck_store.format.errors import (
    RecordNotFoundError,
    TierUnavailableError,
    TooNewError,
    UnsupportedError,
)
from adacheck_store.format.head import ArrayInfo, SealedHead
from adacheck_store.format.ids import block_digests
from adacheck_store.format.keys import (
    Key,
    base_key,
    delta_key,
    extra_key,
    layout_key,
    log_key,
    manifest_key,
)
from adacheck_store.format.manifest import Claim, Floor, Manifest, PartEntry, Tag
from adacheck_store.format.record import Record
from adacheck_store.store import Store
from adacheck_store.tiers.base import Source, Tier, TierTraits
from adacheck_store.tools.findings import (
    BY_RULE,
    KINDS,
    Finding,
    Provable,
    exit_code,
    finding,
)
from adacheck_store.tools.fsck import fsck
from adacheck_store.tools.fsck_chain import check_holes
from adacheck_store.tools.fsck_deep import FoldedRow
from adacheck_store.tools.restore import restore
from tests.core.toy import Toy
from tests.tools.stores import adamw, make_toy

RUN, PART, RANK = "r", "p000000", "r000000"
T1, T2 = "t000001-" + "1" * 16, "t000002-" + "2" * 16
TOKEN = "0" * 16


class LooseTier(Tier):
    """A tier that keeps whatever it is given."""

    def __init__(self, name: str = "loose") -> None:
        self.traits = TierTraits(name=name, log=True)
        self.records: dict[str, Record] = {}
        self.error: Exception | None = None

    def put(self, sources: Sequence[Source]) -> None:
        """Not used."""
        raise NotImplementedError

    def head(self, key: str) -> SealedHead:
        """The head, unverified."""
        if key not in self.records:
            raise RecordNotFoundError("no such record")
        if self.records[key].sealed.info == "too new":
            raise TooNewError("format version 9")
        return self.records[key].sealed

    def read(self, key: str, array: str, first: int, count: int) -> memoryview:
        """Blocks."""
        return self.records[key].arrays[array][first << 20 : (first + count) << 20]

    def list(self, prefix: str) -> Iterator[str]:
        """Keys."""
        if self.error is not None:
            raise self.error
        yield from sorted(key for key in self.records if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Forget records."""
        for key in keys:
            del self.records[key]

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Chain:
    """A sound chain of six steps in a loose tier, made by a toy; tests bend it."""

    def __init__(self, toy: Toy | None = None) -> None:
        self.tier = LooseTier()
        self.toy: Toy = toy or make_toy()
        self.layout = self.toy.layout.seal(RUN)
        self.put(layout_key(RUN, self.layout.id), self.layout)
        self.manifest = self.add_term(T1)
        self.link = self.link_of(T1, self.manifest, self.manifest)
        self.put_base(self.toy.base(self.link))
        self.put_extra(self.toy.extra(self.link))
        for _ in range(6):
            self.step()
        self.put_base(self.toy.base(self.link))

    def step(self) -> None:
        """One more step."""
        self.toy.train()
        record = self.toy.delta(self.link)
        step = self.toy.step
        self.put(delta_key(RUN, self.link.term, PART, step), record)
        self.link = dataclasses.replace(self.link, parent=record.sealed.id)
        self.put_extra(self.toy.extra(self.link))

    def add_term(self, term: str, step: int = 0, index: int = 1, **more: Any) -> str:
        """Claim a term and write its manifest; the manifest's id."""
        self.put(log_key(RUN, index), Claim(run=RUN, term=term, index=index).seal())
        sealed = Manifest(
            run=RUN, term=term, step=step, ranks=(RANK,),
            parts=(PartEntry(name=PART, layout=self.layout.id),), **more,
        ).seal()  # fmt: skip
        self.put(manifest_key(RUN, term, step), sealed)
        return sealed.id

    def link_of(self, term: str, manifest: str, parent: str) -> Link:
        """Where the next record hangs."""
        return Link(run=RUN, term=term, part=PART, rank=RANK, parent=parent, manifest=manifest,
                    layout=self.layout.id)  # fmt: skip

    def put(self, key: Key, record: Record | SealedHead) -> None:
        """Store a record."""
        whole = record if isinstance(record, Record) else Record(record, {})
        kept = {name: memoryview(bytes(data)) for name, data in whole.arrays.items()}
        self.tier.records[str(key)] = Record(whole.sealed, kept)

    def put_base(self, record: Record, token: str = TOKEN) -> None:
        """Store a base."""
        head = record.sealed.head
        self.put(base_key(RUN, head.term, PART, head.step or 0, token), record)

    def put_extra(self, record: Record) -> None:
        """Store an extra."""
        head = record.sealed.head
        self.put(extra_key(RUN, head.term, RANK, head.step or 0), record)

    def key(self, kind: str, step: int) -> str:
        """Key of a record of the first term."""
        if kind == "base":
            return str(base_key(RUN, T1, PART, step, TOKEN))
        if kind == "delta":
            return str(delta_key(RUN, T1, PART, step))
        return str(extra_key(RUN, T1, RANK, step))

    def change(self, key: str, arrays: dict[str, bytes] | None = None, **fields: Any) -> str:
        """Replace fields of a record's head (and bytes of its arrays); its new id."""
        record = self.tier.records[key]
        data = {**record.arrays, **{n: memoryview(b) for n, b in (arrays or {}).items()}}
        infos = tuple(
            dataclasses.replace(info, digests=block_digests(data[info.name]))
            for info in record.sealed.head.arrays
        )
        head = dataclasses.replace(record.sealed.head, **{"arrays": infos, **fields})
        self.tier.records[key] = Record(SealedHead.seal(head), data)
        return self.tier.records[key].sealed.id

    def body(self, key: str, **fields: Any) -> None:
        """Replace fields of a record's body."""
        body = {**self.tier.records[key].sealed.head.body, **fields}
        self.change(key, body=body)

    def floor(self, step: int, *kept: int) -> None:
        """Write a floor, and delete what it covers."""
        entry = Floor(run=RUN, term=T1, index=7, tier="loose", terms=(T1,), step=step, kept=kept)
        self.put(log_key(RUN, 7), entry.seal())

    def rows(self) -> list[Finding | Provable]:
        """What fsck says."""
        return list(fsck(Store("memory://loose", self.tier, self.tier)))

    def found(self) -> dict[str, Finding]:
        """Findings by kind."""
        return {row.kind: row for row in self.rows() if isinstance(row, Finding)}


def padding(chain: Chain) -> None:
    """A byte between two slices."""
    key = chain.key("base", 6)
    data = bytearray(chain.tier.records[key].arrays["s0/param"])
    end = chain.toy.section.slices[1]
    data[4 * (end.offset + end.elements)] = 1
    chain.change(key, {"s0/param": bytes(data)})


def loose_pieces(chain: Chain) -> None:
    """A gradient further back than padding needs."""
    key = chain.key("delta", 6)
    record = chain.tier.records[key]
    (update,) = record.sealed.head.body["updates"]
    grads = [list(row) for row in update["grads"]]
    grads[-1][3] += 128
    info = record.sealed.head.arrays[0]
    longer = dataclasses.replace(info, elements=info.elements + 128)
    data = bytes(record.arrays[info.name])
    moved = data[:-128] + bytes(256) + data[-128:]
    body = {**record.sealed.head.body, "updates": [{**update, "grads": grads}]}
    sealed = SealedHead.seal(
        dataclasses.replace(
            record.sealed.head, body=body,
            arrays=(dataclasses.replace(longer, digests=block_digests(memoryview(moved))),),
        )
    )  # fmt: skip
    chain.tier.records[key] = Record(sealed, {info.name: memoryview(moved)})
    chain.tier.delete([chain.key("base", 6)])


def too_new(chain: Chain) -> None:
    """A record of a newer format."""
    key = chain.key("delta", 6)
    record = chain.tier.records[key]
    chain.tier.records[key] = Record(
        dataclasses.replace(record.sealed, info="too new"), record.arrays
    )


def tier_unread(chain: Chain) -> None:
    """A tier that does not answer."""
    other = LooseTier("other")
    other.error = TierUnavailableError("does not answer")
    store = Store("memory://loose", chain.tier, other)
    rows = list(fsck(store))
    chain.rows = lambda: rows  # type: ignore[method-assign]


def manifest_mismatch(chain: Chain) -> None:
    """A manifest that names another layout for the part."""
    other = make_toy().layout
    sections = tuple(dataclasses.replace(s, name="s1") for s in other.sections)
    sealed = dataclasses.replace(other, sections=sections).seal(RUN)
    chain.put(layout_key(RUN, sealed.id), sealed)
    chain.change(chain.key("delta", 6), layout=sealed.id)


def layout_mismatch(chain: Chain) -> None:
    """A delta that leaves a slice out."""
    key = chain.key("delta", 6)
    (update,) = chain.tier.records[key].sealed.head.body["updates"]
    chain.body(key, updates=[{**update, "grads": update["grads"][:-1]}])


def base_beside(chain: Chain) -> None:
    """A base at a new start that the delta after it does not follow."""
    chain.link = dataclasses.replace(chain.link, parent=chain.manifest)
    record = chain.toy.base(chain.link, gap={"reason": "mismatch", "from": 3})
    sealed = SealedHead.seal(dataclasses.replace(record.sealed.head, step=3))
    chain.put_base(Record(sealed, record.arrays))


def body(chain: Chain) -> None:
    """A body without its fields."""
    chain.change(chain.key("extra", 3), body={"tree": {}})


def link(chain: Chain) -> None:
    """A delta of another parent."""
    chain.change(chain.key("delta", 4), parent="a" * 64)


def base_link(chain: Chain) -> None:
    """A base of another parent than the deltas around it."""
    chain.change(chain.key("base", 6), parent="a" * 64)


def base_parent(chain: Chain) -> None:
    """A base as a parent."""
    chain.change(chain.key("delta", 4), parent=chain.tier.records[chain.key("base", 0)].sealed.id)


def unbased_start(chain: Chain) -> None:
    """A replayed base at a new start."""
    chain.body(chain.key("base", 0), origin="replayed")


def unexplained_start(chain: Chain) -> None:
    """A new start within a term that gives no reason."""
    chain.change(chain.key("base", 6), parent=chain.manifest)


def claim(chain: Chain) -> None:
    """A term nobody claimed."""
    chain.tier.delete([str(log_key(RUN, 1))])


def unused_claim(chain: Chain) -> None:
    """A claim nobody used."""
    chain.put(log_key(RUN, 2), Claim(run=RUN, term=T2, index=2).seal())


def tip(chain: Chain) -> str:
    """The link at step 6."""
    return chain.tier.records[chain.key("delta", 6)].sealed.id


def fork_term(chain: Chain, number: str = T2, **more: Any) -> None:
    """A second term that goes on for two steps."""
    given = {"step": 6, "fork_step": 6, "parent_term": T1, "tips": {PART: tip(chain)}, **more}
    manifest = chain.add_term(number, index=2, **given)
    chain.link = chain.link_of(number, manifest, manifest)
    chain.step()
    chain.step()


def term_number(chain: Chain) -> None:
    """A child numbered below its parent."""
    fork_term(chain, "t000000-" + "2" * 16)


def parent_term(chain: Chain) -> None:
    """A parent of whose manifest nothing is left."""
    fork_term(chain)
    chain.tier.delete([str(manifest_key(RUN, T1, 0))])


def tips(chain: Chain) -> None:
    """A tip that is not the parent's link."""
    fork_term(chain, tips={PART: "b" * 64})


def revision(chain: Chain) -> None:
    """A second revision that does not name the first."""
    chain.add_term(T1, step=3, previous="c" * 64)


def extra_ref(chain: Chain) -> None:
    """An extra that refers to one that does not hold the name."""
    chain.change(chain.key("extra", 5), body=ExtraBody(tree={"n": 5}, refs={"rng": 2}).to_json())


def floor(chain: Chain) -> None:
    """A floor at a step without base."""
    chain.floor(5)


def floor_kept(chain: Chain) -> None:
    """A kept step that cannot be produced."""
    chain.floor(6, 3)


def tag(chain: Chain) -> None:
    """A name for a step that there is not."""
    chain.put(log_key(RUN, 7), Tag(run=RUN, term=T1, index=7, name="good", step=5).seal())
    chain.tier.delete([chain.key("delta", 5)])


def below_floor(chain: Chain) -> None:
    """Records that a floor lets go."""
    chain.floor(6)


def unnamed(chain: Chain) -> None:
    """A term without a record."""
    chain.add_term(T2, step=6, index=2, fork_step=6, parent_term=T1, tips={PART: tip(chain)})


def drift(chain: Chain) -> None:
    """Class bounded, and captured bases far apart."""
    for step in (0, 6):
        chain.body(chain.key("base", step), **{"class": "bounded"})
    far = chain.tier.records[chain.key("delta", 6)]
    chain.put(
        delta_key(RUN, T1, PART, 400),
        Record(SealedHead.seal(dataclasses.replace(far.sealed.head, step=400)), far.arrays),
    )


def declared_gap(chain: Chain) -> None:
    """Steps that a captured base says were given up."""
    chain.tier.delete([chain.key("delta", 4), chain.key("delta", 6), chain.key("base", 6)])
    chain.link = dataclasses.replace(chain.link, parent=chain.manifest)
    chain.put_base(chain.toy.base(chain.link, gap={"reason": "mismatch", "from": 4}))


def base_missing(chain: Chain) -> None:
    """The base with which the first term begins."""
    chain.tier.delete([chain.key("base", 0)])


def tail(chain: Chain) -> None:
    """A last step without its extra."""
    chain.step()
    chain.tier.delete([chain.key("extra", 7)])


def gap(chain: Chain) -> None:
    """A step in between without its extra."""
    chain.tier.delete([chain.key("extra", 3)])


def hole(chain: Chain) -> None:
    """A delta in between is gone."""
    chain.tier.delete([chain.key("delta", 3)])


def unreachable(chain: Chain) -> None:
    """A branch that hangs on nothing, beside a line that does."""
    fork_term(chain, tips={PART: "b" * 64})
    line = "t000003-" + "3" * 16
    chain.add_term(line, step=6, index=3, fork_step=6, parent_term=T1, tips={PART: tip(chain)})


def manifestless(chain: Chain) -> None:
    """Records of a term whose manifest is gone."""
    fork_term(chain)
    chain.tier.delete([str(manifest_key(RUN, T2, 6))])


def swapped(chain: Chain) -> None:
    """A record under another's key."""
    records = chain.tier.records
    records[chain.key("delta", 3)] = records[chain.key("delta", 4)]


def block(chain: Chain) -> None:
    """Bytes that differ from their digest."""
    key = chain.key("base", 6)
    data = bytearray(chain.tier.records[key].arrays["s0/param"])
    data[5] ^= 1
    record = chain.tier.records[key]
    chain.tier.records[key] = Record(
        record.sealed, {**record.arrays, "s0/param": memoryview(bytes(data))}
    )


def layout_missing(chain: Chain) -> None:
    """No layout."""
    chain.tier.delete([str(layout_key(RUN, chain.layout.id))])


def manifest_missing(chain: Chain) -> None:
    """No manifest."""
    chain.tier.delete([str(manifest_key(RUN, T1, 0))])


CASES: dict[str, Callable[[Chain], None]] = {
    "padding": padding, "loose-pieces": loose_pieces, "too-new": too_new,
    "tier-unread": tier_unread, "manifest-mismatch": manifest_mismatch,
    "layout-mismatch": layout_mismatch, "body": body, "link": link, "base-link": base_link,
    "base-parent": base_parent, "unbased-start": unbased_start,
    "unexplained-start": unexplained_start, "claim": claim, "unused-claim": unused_claim,
    "term-number": term_number, "parent-term": parent_term, "tips": tips, "revision": revision,
    "extra-ref": extra_ref, "floor": floor, "floor-kept": floor_kept, "tag": tag,
    "below-floor": below_floor, "unnamed": unnamed, "drift": drift,
    "declared-gap": declared_gap, "base-missing": base_missing, "tail": tail, "gap": gap,
    "hole": hole, "unreachable": unreachable, "manifestless": manifestless, "swapped": swapped,
    "block": block, "layout-missing": layout_missing, "manifest-missing": manifest_missing,
}  # fmt: skip

ELSEWHERE = {
    "marker", "tier-damaged", "quarantined", "head", "document", "fork", "pack", "foreign",
    "unfinished",
}  # fmt: skip
"""Kinds that need a real tier: `test_damage`."""


def test_the_chain_is_sound() -> None:
    """Unbent, it has no findings at all, and all its steps are provable."""
    chain = Chain()
    assert chain.found() == {}
    (row,) = [row for row in chain.rows() if isinstance(row, Provable)]
    assert (row.tier, row.steps, row.count) == ("all", "0..6", 7)


def test_a_forked_chain_is_sound() -> None:
    """A second term adds nothing to find."""
    chain = Chain()
    fork_term(chain)
    assert chain.found() == {}
    assert chain.rows()[-1] == Provable(run=RUN, tier="all", steps="0..8", newest=8, count=9)


def test_a_base_that_nothing_follows() -> None:
    """A base and the delta after it have one parent, at a new start too."""
    chain = Chain()
    base_beside(chain)
    assert chain.found()["base-link"].key == chain.key("delta", 4)


def test_a_tier_that_has_received_nothing_is_sound() -> None:
    """A far tier with a term's documents and no record yet: killed before the first drain."""
    chain = Chain()
    far = LooseTier("far")
    far.records = {
        key: record for key, record in chain.tier.records.items()
        if "/layout/" in key or "/manifest/" in key or "/log/" in key
    }  # fmt: skip
    rows = list(fsck(Store("memory://loose", chain.tier, far)))
    assert {row.kind for row in rows if isinstance(row, Finding)} == {"unnamed"}
    steps = {row.tier: row.steps for row in rows if isinstance(row, Provable)}
    assert steps == {"all": "0..6", "loose": "0..6", "far": ""}


@pytest.mark.parametrize("kind", CASES)
def test_broken_rule_is_found(kind: str) -> None:
    """The rule is named, with what follows and what to do, and the exit code fits."""
    chain = Chain()
    CASES[kind](chain)
    found = chain.found()
    assert kind in found
    item = found[kind]
    assert item.what
    assert item.consequence
    assert item.remedy
    assert item.run == RUN or kind == "tier-unread"
    if item.severity == "damage":
        assert item.invariant
        assert exit_code(found.values()) == 1
    if kind in ("too-new", "tier-unread"):
        assert exit_code([item]) == 3


@pytest.mark.parametrize("at", [0, 1 << 20, (2 << 20) - 1, 2_399_999])
def test_every_block_of_an_array_is_read(at: int) -> None:
    """Arrays of several blocks: the block is named by its bytes, the others are still checked."""
    chain = Chain(Toy([(600, 1000)], adamw, base_every=8))
    key = chain.key("base", 6)
    record = chain.tier.records[key]
    data = bytearray(record.arrays["s0/exp_avg"])
    data[at] ^= 1
    arrays = {**record.arrays, "s0/exp_avg": memoryview(bytes(data))}
    chain.tier.records[key] = Record(record.sealed, arrays)
    low = at >> 20 << 20
    high = min(low + (1 << 20), len(data))
    found = chain.found()
    assert set(found) == {"block"}
    assert f"array s0/exp_avg, bytes {low}..{high}" in found["block"].what
    for name in list(arrays):
        arrays[name] = memoryview(bytes(len(arrays[name])))
    chain.tier.records[key] = Record(record.sealed, arrays)
    rows = [row for row in chain.rows() if isinstance(row, Finding) and row.kind == "block"]
    assert rows[-1].what == "9 blocks are wrong in all"
    assert len(rows) == 4


def test_an_extra_that_stands_by_its_base_makes_no_hole() -> None:
    """A tag puts both there ahead of what is yet to be drained."""
    chain = Chain()
    chain.tier.delete([chain.key("extra", step) for step in (3, 4, 5)])

    def holes() -> list[str]:
        alone = read_catalog([chain.tier], RUN)
        return [row.what for row in check_holes(chain.tier.traits.name, alone, set())]

    assert holes() == []
    chain.tier.delete([chain.key("base", 6)])
    assert holes() == ["no extra of steps 3..5 of r000000"]


def test_restore_needs_the_extras_whole(tmp_path: Path) -> None:
    """A step whose extra has a wrong block does not exist, though its tensors are right."""
    chain = Chain()
    noise = torch.arange(5, dtype=torch.int64)
    info = ArrayInfo(name="rng", dtype="I64", elements=5, digests=block_digests(byte_view(noise)))
    key = chain.key("extra", 6)
    head = dataclasses.replace(
        chain.tier.records[key].sealed.head, arrays=(info,),
        body=ExtraBody(tree={"rng": ArrayRef("rng", "I64", (5,))}).to_json(),
    )  # fmt: skip
    chain.tier.records[key] = Record(SealedHead.seal(head), {"rng": byte_view(noise)})
    store = Store("memory://loose", chain.tier, chain.tier)
    assert restore(store, tmp_path / "whole").step == 6
    chain.tier.records[key] = Record(chain.tier.records[key].sealed, {"rng": byte_view(noise + 1)})
    row = restore(store, tmp_path / "out")
    assert (row.step, row.lost) == (5, 1)
    assert any("extra/000000000006" in reason for reason in row.reasons)
    assert chain.found()["block"].key == key


def deep(chain: Chain, count: int = 9) -> tuple[list[FoldedRow], dict[str, Finding]]:
    """What the deep check folds and finds, beyond what the plain one does."""
    rows = list(fsck(Store("memory://loose", chain.tier, chain.tier), deep=count))
    assert chain.found() == {}, "bytes are as they were written"
    return [r for r in rows if isinstance(r, FoldedRow)], {
        r.kind: r for r in rows if isinstance(r, Finding)
    }  # fmt: skip


def test_deep_folds_a_sample() -> None:
    """Evenly from the newest to the oldest; bases are held against the fold that leads to them."""
    rows, found = deep(Chain())
    assert found == {}
    assert [(row.step, row.base, row.deltas) for row in rows] == [
        (6, 6, 0), (5, 0, 5), (4, 0, 4), (3, 0, 3), (2, 0, 2), (1, 0, 1), (0, 0, 0),
    ]  # fmt: skip
    assert [row.compared for row in rows] == [1, 0, 0, 0, 0, 0, 0]
    assert rows[0].drift == 0.0
    assert all(row.checked > 0 for row in rows if row.deltas)
    assert {(row.exactness, row.differed) for row in rows} == {("exact", 0)}
    assert [row.step for row in deep(Chain(), 3)[0]] == [6, 3, 0]
    assert [row.step for row in deep(Chain(), 1)[0]] == [6]


@pytest.mark.parametrize(("step", "steps"), [(6, [5, 4, 3, 2, 1, 0]), (0, [0])])
def test_deep_finds_what_digests_cannot(step: int, steps: list[int]) -> None:
    """A base with digests of its own that is not the trainer's state, and what hangs on it."""
    chain = Chain()
    key = chain.key("base", step)
    data = bytearray(chain.tier.records[key].arrays["s0/param"])
    data[2] ^= 1
    chain.change(key, {"s0/param": bytes(data)})
    rows, found = deep(chain)
    assert found.keys() == {"fold"}
    assert found["fold"].key == key or step == 0
    assert [row.step for row in rows] == steps


def test_deep_says_what_it_cannot_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that is not known here: not damage, and not clean."""
    chain = Chain()

    def unknown(*_: Any) -> Any:
        raise UnsupportedError("optimizer mine.Own is not known here")

    monkeypatch.setattr("adacheck_store.tools.fsck_deep.open_fold", unknown)
    rows, found = deep(chain)
    assert rows == []
    assert found.keys() == {"not-folded"}
    assert exit_code(found.values()) == 3


DEEP = {"fold", "not-folded"}
"""Kinds of the deep check alone."""

RANKS = {"parted"}
"""Kinds that need several ranks: `tests/ranks/test_parted`."""


RACES = {"unsettled"}
"""Kinds of what changes while it is read: test_racing."""


def test_every_kind_is_tested() -> None:
    """A kind without a case above or in test_damage would prove nothing."""
    assert set(CASES) | ELSEWHERE | DEEP | RANKS | RACES == set(KINDS)
    text = (Path(__file__).parent / "test_damage.py").read_text(encoding="utf-8")
    assert not [kind for kind in ELSEWHERE if f'"{kind}"' not in text]


def invariants() -> set[str]:
    """The invariants of FORMAT.md."""
    text = (Path(adacheck_store.format.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| (INV-\d\d) \|", text, re.MULTILINE))


def test_every_invariant_has_a_check() -> None:
    """Each invariant of the format is named by a kind of finding or by a rule of an error."""
    texts = [*(kind.invariant for kind in KINDS.values()), *BY_RULE.values()]
    named = {name for text in texts for name in text.split()}
    assert invariants()
    assert named <= invariants()
    assert invariants() - named == set()


def test_every_rule_has_its_invariant() -> None:
    """The short names in FORMAT.md's table are those by which errors are mapped."""
    text = (Path(adacheck_store.format.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (INV-\d\d) \| MUST \| .*? \| (.*) \|$", text, re.MULTILINE)
    listed = {rule: name for name, rules in rows for rule in re.findall(r"`([a-z0-9-]+)`", rules)}
    twice = {"float", "dtype", "depth", "delta-layout", "base-layout"}
    assert {r: n for r, n in listed.items() if r not in twice and BY_RULE.get(r) != n} == {}
    assert all(BY_RULE[rule] for rule in twice - {"float", "dtype", "depth"})


def test_exit_codes() -> None:
    """Damage outweighs what could not be checked; warnings and notes are clean."""
    assert exit_code([]) == 0
    assert exit_code([finding("foreign", "x"), finding("unused-claim", "x")]) == 0
    assert exit_code([finding("too-new", "x")]) == 3
    assert exit_code([finding("too-new", "x"), finding("block", "x")]) == 1
