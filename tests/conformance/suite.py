"""The suite every tier inherits: what a tier promises, and what may be done to it."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest

from adacheck_store.format.errors import (
    AdaCheckError,
    ChainBrokenError,
    DigestMismatchError,
    ForkError,
    FormatError,
    MalformedError,
    OrderError,
    RecordNotFoundError,
    TierUnavailableError,
    TruncatedError,
)
from adacheck_store.format.head import SealedHead
from adacheck_store.format.ids import record_id
from adacheck_store.format.record import Block, Record, verify_record
from adacheck_store.tiers.base import RecordSource, Source, Tier
from tests.conformance.doors import Door
from tests.conformance.records import (
    MIB,
    StreamSource,
    World,
    fetch,
    grads,
    noise,
    same,
    sealed,
    state,
)
from tests.forked import Forked


class Box:
    """A tier under test with its place, to be reopened and entered by the back door."""

    def __init__(self, suite: "TierSuite", path: Path) -> None:
        self.suite = suite
        self.path = path
        self.tier = suite.make(path)
        self.world = World()

    def reopen(self) -> Tier:
        """Close the tier and open it again, where it persists."""
        if self.suite.persistent:
            self.tier.close()
            self.tier = self.suite.make(self.path)
        return self.tier

    def behind(self, act: Callable[[Door], Any]) -> Any:
        """Do something by the back door while the tier is closed."""
        if self.suite.persistent:
            self.tier.close()
        try:
            return act(self.suite.door(self.path, self.tier))
        finally:
            if self.suite.persistent:
                self.tier = self.suite.make(self.path)

    def rooted(self) -> Tier:
        """The tier with the world's layout and manifest in it."""
        self.tier.put(self.world.roots())
        return self.tier


class TierSuite:
    """Conformance of a tier; each subclass says how to make one and how to get behind it."""

    persistent: ClassVar[bool] = True
    packs: ClassVar[bool] = False
    several_runs: ClassVar[bool] = True
    readers: ClassVar[bool] = True
    """Whether another process can open it beside this one."""
    tier_class: ClassVar[type[Tier]]
    name: ClassVar[str] = ""
    """Name among the suites, where the class's own is not enough."""

    def make(self, path: Path) -> Tier:
        """Open the tier at a path."""
        raise NotImplementedError

    def door(self, path: Path, tier: Tier) -> Door:
        """The back door to it."""
        raise NotImplementedError

    @pytest.fixture
    def box(self, tmp_path: Path) -> Iterator[Box]:
        """A fresh tier."""
        box = Box(self, tmp_path / "tier")
        yield box
        box.tier.close()

    # -- round trips --

    def test_what_was_put_is_there(self, box: Box) -> None:
        """Every kind comes back as it was, before and after the tier is opened again."""
        tier, world = box.rooted(), box.world
        sources: list[Source] = [
            world.base(3, state()), world.delta(1, grads()), world.delta(2), world.delta(3, {}),
            world.extra(1, {"rng/cpu": ("U8", noise(5056))}), world.extra(2), world.claim(1),
        ]  # fmt: skip
        tier.put(sources)
        assert same(tier, [*world.roots(), *sources])
        tier.sync()
        assert same(box.reopen(), [*world.roots(), *sources])

    def test_put_is_found_behind(self, box: Box) -> None:
        """What the tier wrote is what another program finds in its files."""
        tier, world = box.rooted(), box.world
        sources = [world.base(1, state()), world.delta(1, grads()), world.extra(1)]
        tier.put(sources)
        tier.sync()
        for source in [*sources, *world.roots()]:
            found = box.behind(lambda door, key=source.key: door.load(key))
            assert found.pop("adacheck") == source.record.sealed.raw
            assert found.pop("id").decode() == source.record.sealed.id
            for name, view in source.record.arrays.items():
                assert found.get(name, b"") == view

    def test_what_stands_behind_is_read(self, box: Box) -> None:
        """What another program wrote by the rules is read and verified."""
        world = box.world
        box.rooted().sync()
        sources = [world.base(1, state()), world.delta(1, grads()), world.extra(1)]
        box.behind(lambda door: [door.store(s.key, s.record) for s in sources])
        assert same(box.tier, sources)
        assert {s.key for s in sources} <= set(box.tier.list(""))

    def test_dtypes(self, box: Box) -> None:
        """All patterns of bfloat16, and dtypes no store knows, keep every bit."""
        tier, world = box.rooted(), box.world
        patterns = b"".join(i.to_bytes(2, "little") for i in range(65536))
        arrays = {
            "a/bf16": ("BF16", patterns), "a/f16": ("F16", patterns),
            "a/f8e4m3": ("F8_E4M3", bytes(range(256))), "a/f8e5m2": ("F8_E5M2", bytes(range(256))),
            "a/bool": ("BOOL", bytes([0, 1] * 65)), "a/c128": ("C128", noise(16 * 33)),
            "a/c64": ("C64", noise(8 * 33)), "a/f64": ("F64", noise(8 * 33)),
            "a/none": ("C128", b""), "a/one": ("U8", b"x"),
        }  # fmt: skip
        source = world.base(1, arrays)
        tier.put([source])
        assert same(tier, [source])
        assert same(box.reopen(), [source])

    def test_sizes_at_the_edges(self, box: Box) -> None:
        """Arrays around blocks, pages and chunks."""
        tier, world = box.rooted(), box.world
        sizes = [1, MIB - 1, MIB, MIB + 1, 4 * MIB, 4 * MIB + 1, 8 * MIB, 8 * MIB + 1]
        arrays = {f"a/n{size}": ("U8", noise(size)) for size in sizes}
        sources = [world.base(1, arrays), world.delta(1, arrays)]
        tier.put(sources)
        tier.put([StreamSource(world.base(2, arrays))])
        assert same(tier, sources)

    def test_names(self, tmp_path: Path) -> None:
        """Names as long as the grammar allows."""
        tier = self.make(tmp_path / "names")
        world = World(run="R" * 128) if self.several_runs else World()
        world.part = "p999999"
        name = "/".join(["a" * 49] * 3 + ["z" * 50])
        sources = [world.base(10**12 - 1, {name: ("U8", noise(5))}, "f" * 16)]
        tier.put([*world.roots(), *sources])
        assert same(tier, sources)
        assert sources[0].key in list(tier.list(f"{world.run}/"))
        tier.close()

    # -- sources --

    def test_stream_of_unknown_id(self, box: Box) -> None:
        """Blocks that interleave in one reused buffer, the id known at the end only."""
        tier, world = box.rooted(), box.world
        sources = [StreamSource(world.base(1, state())), StreamSource(world.delta(1, grads()))]
        tier.put(sources)
        assert same(tier, sources)
        assert [source.seals for source in sources] == [1, 1]
        with pytest.raises(ForkError):
            tier.put([sources[0]])

    def test_buffers_may_be_reused(self, box: Box) -> None:
        """A tier keeps no view of what it was given."""
        tier, world = box.rooted(), box.world
        source = world.delta(1, {"0/a/grad.raw": ("U8", bytes(3 * MIB))})
        buffer = bytearray(3 * MIB)
        record = type(source.record)(source.record.sealed, {"0/a/grad.raw": memoryview(buffer)})
        tier.put([RecordSource(source.key, record)])
        buffer[:] = b"\xff" * len(buffer)
        assert same(tier, [source])

    @pytest.mark.parametrize("after", [0, 1, 5, 12])
    def test_writer_dies_midway(self, box: Box, after: int) -> None:
        """A source that raises leaves nothing of any record of the put."""
        tier, world = box.rooted(), box.world
        good = world.delta(1, grads())
        bad = StreamSource(world.base(1, state()), fail_after=after)
        with pytest.raises(InterruptedError):
            tier.put([good, bad])
        assert sorted(tier.list("")) == sorted(source.key for source in world.roots())
        assert not box.behind(lambda door: door.leftovers())
        bad.fail_after = None
        box.tier.put([good, bad])
        assert same(box.tier, [good, bad])

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda blocks: islice(blocks, 3), TruncatedError),
            (lambda blocks: (b for b in blocks if b.index != 1), MalformedError),
            (lambda blocks: (bent(b, b.index == 2) for b in blocks), DigestMismatchError),
            (lambda blocks: (cut(b, b.index == 2) for b in blocks), (TruncatedError, FormatError)),
            (lambda blocks: reversed(list(blocks)), MalformedError),
            (lambda blocks: (b for pair in blocks for b in (pair, pair)), MalformedError),
            (lambda blocks: (Block("0/zz/grad.raw", b.index, b.data) for b in blocks), FormatError),
        ],
        ids=["short", "gap", "flipped", "cut", "reversed", "doubled", "stray"],
    )
    @pytest.mark.parametrize("kind", ["base", "delta"])
    def test_stream_that_lies(self, box: Box, change: Any, error: Any, kind: str) -> None:
        """Blocks other than the head's make the put fail and leave nothing."""
        tier, world = box.rooted(), box.world
        inner = world.base(1, state()) if kind == "base" else world.delta(1, grads())
        with pytest.raises(error) as caught:
            tier.put([StreamSource(inner, change=change)])
        assert caught.value.place["tier"] == tier.traits.name
        assert inner.key not in list(tier.list(""))
        with pytest.raises(RecordNotFoundError):
            tier.head(inner.key)
        assert not box.behind(lambda door: door.leftovers())

    def test_head_that_lies(self, box: Box) -> None:
        """Another id than announced, another place than the key, no key at all."""
        tier, world = box.rooted(), box.world
        one, two = world.delta(1, grads()), world.delta(2, grads())
        swapped = RecordSource(two.key, one.record)
        other_layout = RecordSource(
            world.roots()[0].key, sealed("layout", run=world.run, body={"other": 1})
        )
        for source in (swapped, other_layout, RecordSource("no/key", one.record)):
            with pytest.raises((FormatError, ForkError)):
                tier.put([source])
        pack = f"{world.run}/{world.term}/{world.part}/pack/{'0' * 12}-{'0' * 12}-{'a' * 16}"
        with pytest.raises(FormatError):
            tier.put([RecordSource(pack, one.record)])
        with pytest.raises(ForkError):
            tier.put([one, one])
        announced = StreamSource(two, announce=True)
        announced.inner = RecordSource(two.key, world.delta(2, grads()).record)
        liar = _Liar(announced, two.expected_id)
        with pytest.raises(DigestMismatchError):
            tier.put([liar])
        assert len(list(tier.list(""))) == 2

    # -- double puts and repair --

    def test_double_put_of_the_same(self, box: Box) -> None:
        """Putting again is allowed and changes nothing."""
        tier, world = box.rooted(), box.world
        sources = [world.base(1, state()), world.delta(1, grads()), world.claim(1)]
        tier.put(sources)
        tier.put([*world.roots(), *sources])
        assert same(tier, sources)
        assert len(list(tier.list(""))) == 5

    @pytest.mark.parametrize("how", ["flip", "shorten", "lose"])
    @pytest.mark.parametrize("kind", ["base", "delta"])
    def test_double_put_repairs(self, box: Box, how: str, kind: str) -> None:
        """A damaged block is seen, and a second put heals it; a false one does no harm."""
        world = box.world
        box.rooted()
        source = world.base(1, state()) if kind == "base" else world.delta(1, grads())
        array = next(iter(source.record.arrays))
        box.tier.put([source])
        box.tier.sync()
        box.behind(lambda door: door.damage(source.key, array, how))
        errors = {"flip": DigestMismatchError, "shorten": TruncatedError}
        with pytest.raises(errors.get(how, RecordNotFoundError)):
            fetch(box.tier, source.key)
        other = next(name for name in list(source.record.arrays)[1:] if source.record.arrays[name])
        if not (self.packs and kind == "delta"):
            assert bytes(box.tier.read(source.key, other, 0, 1))
        bad = StreamSource(source, announce=True, change=lambda bs: (bent(b, True) for b in bs))
        with pytest.raises(DigestMismatchError):
            box.tier.put([bad])
        box.tier.put([StreamSource(source, announce=True)])
        assert same(box.tier, [source])
        assert same(box.reopen(), [source])

    @pytest.mark.parametrize("kind", ["base", "delta"])
    def test_damaged_head(self, box: Box, kind: str) -> None:
        """A head that does not verify is an error, hides no other record, and can be put anew."""
        world = box.world
        box.rooted()
        other = world.extra(1)
        source = world.base(1, state()) if kind == "base" else world.delta(1, grads())
        box.tier.put([source, other])
        box.behind(lambda door: door.damage_head(source.key))
        with pytest.raises((FormatError, RecordNotFoundError)):
            box.tier.head(source.key)
        with pytest.raises((FormatError, RecordNotFoundError)):
            box.tier.read(source.key, next(iter(source.record.arrays)), 0, 1)
        assert same(box.tier, [other])
        box.tier.put([source])
        assert same(box.tier, [source])

    def test_other_record_under_a_key_is_a_fork(self, box: Box) -> None:
        """Records are never replaced."""
        tier, world = box.rooted(), box.world
        base, claim = world.base(1, state(), "a" * 16), world.claim(7)
        tier.put([base, claim])
        again = world.base(1, state(), "a" * 16)
        for source in (again, World(run=world.run).claim(7), StreamSource(again)):
            with pytest.raises(ForkError) as caught:
                tier.put([source])
            assert caught.value.place["key"] == source.key
        assert same(tier, [base, claim])
        self.check_delta_fork(box)

    def check_delta_fork(self, box: Box) -> None:
        """A second id for a step is refused at once; in packs it is found at read."""
        tier, world = box.tier, box.world
        one, two = world.delta(1, grads()), world.delta(1, grads())
        tier.put([one])
        if not self.packs:
            with pytest.raises(ForkError):
                tier.put([two])
            assert same(tier, [one])
            return
        tier.put([two])
        for act in (lambda: tier.head(one.key), lambda: tier.read(one.key, "x", 0, 0)):
            with pytest.raises(ForkError) as caught:
                act()
            assert caught.value.place["step"] == 1
        assert [key for key in tier.list("") if key == one.key] == [one.key]

    # -- links --

    def test_layout_and_manifest_come_first(self, box: Box) -> None:
        """A record whose layout or manifest is not held is refused, together with all of a put."""
        tier, world = box.tier, box.world
        delta, extra, base = world.delta(1, grads()), world.extra(1), world.base(1, state())
        for source in (delta, extra, base):
            with pytest.raises(ChainBrokenError) as caught:
                tier.put([source])
            assert "held here" in str(caught.value)
        tier.put(world.roots()[:1])
        with pytest.raises(ChainBrokenError):
            tier.put([delta])
        assert list(tier.list("")) == [world.roots()[0].key]
        tier.put([delta, extra, base, *world.roots()])
        assert same(tier, [delta, extra, base])
        assert not box.behind(lambda door: door.leftovers())

    # -- listing and deleting --

    def test_listing(self, box: Box) -> None:
        """Keys come sorted, by prefixes that end at a slash, and nothing else does."""
        tier, world = box.rooted(), box.world
        sources = [world.delta(step) for step in (1, 2, 3, 9, 10, 11, 1000)]
        sources += [world.extra(step) for step in (1, 2)]
        sources += [world.delta(2, part="p000001"), world.base(2, state()), world.base(10, {})]
        sources += [world.claim(1), world.claim(2)]
        tier.put(sources)
        keys = [source.key for source in (*sources, *world.roots())]
        if self.several_runs:
            other = World(run="gpt-small.2")
            tier.put([*other.roots(), other.delta(1)])
            keys += [source.key for source in (*other.roots(), other.delta(1))]
        term, part = f"{world.run}/{world.term}/", f"{world.run}/{world.term}/{world.part}/"
        prefixes = ["", f"{world.run}/", f"{world.run}/log/", term, part, part + "delta/"]
        prefixes += [
            part + "base/",
            f"{term}{world.rank}/extra/",
            f"{term}manifest/",
            f"{term}none/",
        ]
        prefixes += ["none/"] if self.several_runs else []
        for found in (lambda: box.tier, box.reopen):
            tier = found()
            for prefix in prefixes:
                expected = sorted(key for key in keys if key.startswith(prefix))
                assert list(tier.list(prefix)) == expected

    def test_delete(self, box: Box) -> None:
        """Deleting is idempotent and takes everything that belonged to a record."""
        tier, world = box.rooted(), box.world
        sources = [world.base(1, state()), world.delta(1, grads()), world.extra(1), world.claim(1)]
        tier.put(sources)
        gone = [source.key for source in sources]
        tier.delete([*gone, "no/key", world.delta(77).key])
        tier.delete(gone)
        for source in sources:
            with pytest.raises(RecordNotFoundError):
                tier.head(source.key)
            with pytest.raises(RecordNotFoundError):
                tier.read(source.key, next(iter(source.record.arrays), "a/b"), 0, 1)
        assert len(list(tier.list(""))) == 2
        assert not box.behind(lambda door: door.leftovers())
        box.tier.put(sources)
        assert same(box.tier, sources)
        box.tier.delete([source.key for source in world.roots()])
        with pytest.raises(ChainBrokenError):
            box.tier.put([world.delta(5)])

    def test_delete_during_read(self, box: Box) -> None:
        """A reader of what is being deleted gets right bytes or `RecordNotFoundError`."""
        tier, world = box.rooted(), box.world
        sources = [world.delta(step, grads(MIB)) for step in range(1, 41)]
        for start in range(0, 40, 4):
            tier.put(sources[start : start + 4])
        troubles: list[BaseException] = []

        def read() -> None:
            for source in [*sources, *sources]:
                try:
                    verify_record(fetch(tier, source.key))
                except RecordNotFoundError:
                    continue
                except BaseException as exc:
                    troubles.append(exc)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        listing = tier.list("")
        next(listing)
        tier.delete([source.key for source in sources])
        assert set(listing) <= {s.key for s in (*sources, *world.roots())}
        for thread in threads:
            thread.join(timeout=60)
        assert not troubles
        assert len(list(tier.list(""))) == 2

    # -- reads --

    def test_ranges(self, box: Box) -> None:
        """Runs of blocks are cut exactly; what is outside an array is not found."""
        tier, world = box.rooted(), box.world
        data = noise(11 * MIB + 77)
        sources = [world.base(1, {"a/b": ("U8", data)}), world.delta(1, {"0/a/b": ("U8", data)})]
        tier.put(sources)
        for source in sources:
            name = next(iter(source.record.arrays))
            for first, count in [(0, 12), (3, 1), (3, 2), (7, 4), (11, 1), (8, 4), (5, 0), (12, 0)]:
                wanted = data[first * MIB : (first + count) * MIB]
                assert tier.read(source.key, name, first, count) == wanted
                into = memoryview(bytearray(b"\xee" * len(wanted)))
                tier.read_into(source.key, name, first, count, into)
                assert into == wanted
                for size in {len(wanted) + 1, max(0, len(wanted) - 1)} - {len(wanted)}:
                    wrong = memoryview(bytearray(size))
                    with pytest.raises((TruncatedError, TierUnavailableError)):
                        tier.read_into(source.key, name, first, count, wrong)
            for first, count in [(0, 13), (12, 1), (-1, 1), (3, -1), (2**60, 1)]:
                with pytest.raises(RecordNotFoundError) as caught:
                    tier.read(source.key, name, first, count)
                with pytest.raises(RecordNotFoundError):
                    tier.read_into(source.key, name, first, count, memoryview(b""))
                assert caught.value.place["key"] == source.key
            with pytest.raises(RecordNotFoundError):
                tier.read(source.key, "a/none", 0, 1)

    @pytest.mark.parametrize("key", ["", "x", "../../etc/passwd", "a\0b", "R/log/1", "é" * 300])
    def test_strange_keys_are_not_found(self, box: Box, key: str) -> None:
        """No key reaches outside the records."""
        tier = box.rooted()
        for act in (lambda: tier.head(key), lambda: tier.read(key, "a/b", 0, 1)):
            with pytest.raises(RecordNotFoundError):
                act()
        tier.delete([key])

    # -- together, and by several --

    def test_records_appear_together(self, box: Box) -> None:
        """Records of one put, within one pack for a tier of packs, are seen all or none."""
        tier, world = box.rooted(), box.world
        stop = threading.Event()
        torn: list[int] = []

        def watch() -> None:
            while not stop.is_set():
                seen = len(list(tier.list(f"{world.run}/{world.term}/{world.part}/delta/")))
                if seen % 8:
                    torn.append(seen)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for start in range(1, 81, 8):
            tier.put([world.delta(step, grads(20_000)) for step in range(start, start + 8)])
        stop.set()
        watcher.join(timeout=30)
        assert not torn

    def test_threads(self, box: Box) -> None:
        """Any thread may call any method."""
        tier, world = box.rooted(), box.world
        troubles: list[BaseException] = []

        def work(part: str) -> None:
            try:
                for step in range(1, 11):
                    source = world.delta(step, grads(MIB + 6), part=part)
                    tier.put([source])
                    assert same(tier, [source])
                tier.sync()
            except BaseException as exc:
                troubles.append(exc)

        threads = [threading.Thread(target=work, args=(f"p00000{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not troubles
        assert len(list(tier.list(""))) == 42

    def test_same_record_by_two_threads(self, box: Box) -> None:
        """Two sources of one part put the same bytes at once: one record results."""
        tier, world = box.rooted(), box.world
        source = world.base(1, state())
        troubles: list[BaseException] = []

        def work() -> None:
            try:
                tier.put([StreamSource(source, announce=True)])
            except BaseException as exc:
                troubles.append(exc)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not troubles
        assert same(tier, [source])
        assert not box.behind(lambda door: door.leftovers())

    def test_another_process_reads_beside(self, box: Box) -> None:
        """A second process sees what was put, while this one goes on."""
        if not (self.persistent and self.readers):
            return
        tier, world = box.rooted(), box.world
        tier.put([world.delta(1, grads())])
        name = self.name or self.tier_class.__name__
        reader = Forked(["tests.conformance.reader", name, str(box.path)])
        with reader.stdout:
            for step in range(2, 30):
                tier.put([world.delta(step, grads(100_000))])
            output = reader.stdout.read()
        assert reader.wait(60) == 0, output
        assert int(output.split()[0]) >= 1

    @pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
    def test_many_small_records(self, box: Box, count: int) -> None:
        """Many small records under one sync."""
        tier, world = box.rooted(), box.world
        model = world.delta(1, {"0/a/grad.raw": ("F32", noise(64))})

        def source(step: int) -> RecordSource:
            # Sealing each by the format's own means would take most of the test's time.
            head = model.record.sealed.head
            raw = model.record.sealed.raw.replace(b'"step":1,', b'"step":%d,' % step)
            made = SealedHead(head=replace(head, step=step), raw=raw, id=record_id(raw))
            key = f"{model.key[:-12]}{step:012d}"
            return RecordSource(key, Record(made, model.record.arrays))

        for start in range(1, count, 10_000):
            tier.put([source(step) for step in range(start, start + 10_000)])
        tier.sync()
        prefix = f"{world.run}/{world.term}/{world.part}/delta/"
        keys = list(tier.list(prefix))
        assert len(keys) == count
        assert keys == sorted(keys)
        for key in keys[:: count // 50]:
            verify_record(fetch(tier, key))

    # -- the end --

    def test_close_twice(self, box: Box) -> None:
        """Closing is idempotent; a closed tier says so."""
        tier = box.rooted()
        tier.close()
        tier.close()
        for act in (
            lambda: tier.head("a"), lambda: tier.read("a", "b", 0, 1), lambda: tier.put([]),
            lambda: list(tier.list("")), lambda: tier.delete([]), tier.sync,
        ):  # fmt: skip
            with pytest.raises(OrderError):
                act()
        box.tier = self.make(box.path)

    def test_errors_name_their_place(self, box: Box) -> None:
        """An error names the tier and the key."""
        tier, world = box.rooted(), box.world
        with pytest.raises(AdaCheckError) as caught:
            tier.head(world.delta(5).key)
        assert caught.value.place["tier"] == tier.traits.name
        assert caught.value.place["key"] == world.delta(5).key

    def test_empty_put(self, box: Box) -> None:
        """Putting nothing is nothing."""
        box.tier.put([])
        assert list(box.tier.list("")) == []


class _Liar:
    """A source that announces another id than its head has."""

    def __init__(self, source: StreamSource, announced: str) -> None:
        self._source = source
        self.key = source.key
        self.expected_id = announced
        self.blocks = source.blocks
        self.seal = source.seal


def bent(block: Block, really: bool) -> Block:
    """The block with one bit flipped."""
    if not really:
        return block
    data = bytearray(block.data)
    data[len(data) // 2] ^= 4
    return Block(block.array, block.index, memoryview(data))


def cut(block: Block, really: bool) -> Block:
    """The block without its last byte."""
    return Block(block.array, block.index, block.data[:-1]) if really else block
