"""Checks behind a tier's back: objects and entries that belong to no record, zarr documents."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from adacheck_store.format.errors import AdaCheckError, FormatError, RecordNotFoundError
from adacheck_store.format.keys import MARKER, Key, is_key, parse_key
from adacheck_store.format.record import array_offsets, block_nbytes, verify_block
from adacheck_store.tiers import lmdb_open
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from adacheck_store.tiers.lmdb_entries import PREFIX_BYTES
from adacheck_store.tiers.lmdb_env import MARKER_KEY
from adacheck_store.tiers.object_local import LocalObjects
from adacheck_store.tiers.objects import Objects
from adacheck_store.tiers.zarr import ASIDE, ZarrTier
from adacheck_store.tiers.zarr_chunks import read_span
from adacheck_store.tiers.zarr_meta import (
    DOCUMENT,
    GroupHead,
    array_document,
    chunk_count,
    group_document,
)
from adacheck_store.tiers.zarr_packs import Pack, pack_document, parse_pack, place_of

from .findings import Finding, finding, of_error, of_tier
from .fsck_again import settled
from .fsck_journal import Journal

_SAMPLE = 5
_BATCH = 1000


def check_medium(tier: Tier, run: str = "") -> Iterator[Finding]:
    """What lies in a tier and is no record; of ``run`` alone if it is given."""
    try:
        if isinstance(tier, ZarrTier):
            yield from _objects(tier.traits.name, tier.objects, run)
        elif isinstance(tier, LmdbTier):
            yield from _entries(tier, run)
    except AdaCheckError as error:
        yield of_tier(error, tier.traits.name)


def _objects(tier: str, objects: Objects, run: str) -> Iterator[Finding]:
    prefix = f"{run}/" if run else ""
    if isinstance(objects, LocalObjects):
        yield from _neither(tier, Path(objects.path) / run)
    aside = 0
    for owner, names in groupby(objects.list(prefix), key=owner_of):
        if not owner:
            for name in names:
                if name.startswith(ASIDE):
                    aside += 1
                elif name != MARKER:
                    yield finding("foreign", "an object that is no part of a record", tier=tier,
                                  key=name, path=f"{objects.path}/{name}")  # fmt: skip
            continue
        yield from settled(
            check_group(tier, objects, parse_key(owner), list(names)),
            partial(_group_again, tier, objects, owner),
        )
    if aside:
        yield finding("quarantined", f"{aside} objects that a repair set aside", tier=tier,
                      path=f"{objects.path}/{ASIDE}")  # fmt: skip
    count = 0 if run else objects.unfinished()
    if count:
        yield finding("unfinished", f"{count} objects that were never named", tier=tier,
                      path=objects.path)  # fmt: skip


def _neither(tier: str, root: Path) -> Iterator[Finding]:
    """Links, pipes and devices: nothing is read through them, so what they hide is not checked."""
    for folder, folders, files in os.walk(root, followlinks=False):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                continue  # gone since it was listed
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = "neither a file nor a folder: a link or a device, which is not followed"
                yield replace(finding("foreign", what, tier=tier, path=path), unchecked=True)


def owner_of(name: str) -> str:
    """The key of the record or pack that an object is part of; empty if there is none."""
    words = name.split("/")
    for count in (3, 4, 5):
        if len(words) > count and is_key("/".join(words[:count])):
            return "/".join(words[:count])
    return ""


def _group_again(tier: str, objects: Objects, owner: str) -> list[Finding]:
    """Another reading of a group; of one that is gone there is nothing to say."""
    names = list(objects.list(f"{owner}/"))
    return list(check_group(tier, objects, parse_key(owner), names)) if names else []


def check_group(tier: str, objects: Objects, key: Key, names: list[str]) -> Iterator[Finding]:
    """The objects below a record's or pack's key: those there should be, and their documents."""
    text = str(key)
    document = f"{text}/{DOCUMENT}"
    if document not in names:
        yield finding("unfinished", f"{len(names)} objects of a record without head", tier=tier,
                      key=text, path=f"{objects.path}/{text}")  # fmt: skip
        return
    try:
        stored = objects.get(document)
        if key.kind == "pack":
            expected = _pack_objects(parse_pack(key, stored))
        else:
            expected = _record_objects(text, GroupHead.parse(stored))
    except RecordNotFoundError:
        return  # deleted since it was listed
    except AdaCheckError as error:
        if key.kind == "pack":
            yield of_error(error, tier, text)
        return  # the record's own check names it
    for name in names:
        if name not in expected:
            yield finding("foreign", "an object that is no part of the record", tier=tier,
                          key=text, path=f"{objects.path}/{name}")  # fmt: skip
    for name, content in expected.items():
        if content is None:
            continue
        try:
            if objects.get(name) != content:
                yield finding("document", "a zarr document that does not follow from the head",
                              tier=tier, key=text, path=f"{objects.path}/{name}")  # fmt: skip
        except RecordNotFoundError:
            yield finding("document", "a zarr document is missing", tier=tier, key=text,
                          path=f"{objects.path}/{name}")  # fmt: skip


def _record_objects(key: str, group: GroupHead) -> dict[str, bytes | None]:
    """Names of a record's objects; the content of documents, None for chunks."""
    expected: dict[str, bytes | None] = {f"{key}/{DOCUMENT}": group.document()}
    for info in group.sealed.head.arrays:
        words = info.name.split("/")
        for depth in range(1, len(words)):
            expected[f"{key}/{'/'.join(words[:depth])}/{DOCUMENT}"] = group_document({})
        chunk = group.chunks[info.name]
        text = array_document(info.dtype, info.nbytes, chunk)
        expected[f"{key}/{info.name}/{DOCUMENT}"] = text
        for index in range(chunk_count(info.nbytes, max(1, chunk))):
            expected[f"{key}/{info.name}/c/{index}"] = None
    return expected


def _pack_objects(pack: Pack) -> dict[str, bytes | None]:
    """Names of a pack's objects; the pack's own document if all its heads verify."""
    content: bytes | None = None
    try:
        records = [(p.key, pack.head(step), p.offset) for step, p in sorted(pack.records.items())]
        content = pack_document(pack.nbytes, pack.chunk, records)
    except FormatError:
        pass  # named by the records' own check
    expected: dict[str, bytes | None] = {f"{pack.key}/{DOCUMENT}": content}
    expected[f"{pack.array}/{DOCUMENT}"] = array_document("U8", pack.nbytes, pack.chunk)
    for index in range(chunk_count(pack.nbytes, max(1, pack.chunk))):
        expected[f"{pack.array}/c/{index}"] = None
    return expected


def check_overlaps(tier: Tier, run: str, journal: Journal | None = None) -> Iterator[Finding]:
    """Copies of a record in several packs: a reader sees the first that reads, fsck all."""
    if not isinstance(tier, ZarrTier):
        return
    try:
        widest: Pack | None = None  # of the packs of a place so far, the one that reaches furthest
        checked: set[str] = set()
        for pack in tier.packs(f"{run}/"):
            if widest is not None and place_of(widest.key) == place_of(pack.key):
                if pack.key.step <= widest.key.last:
                    for one in (widest, pack):
                        if str(one.key) not in checked:
                            checked.add(str(one.key))
                            yield from _check_pack(tier, one, journal)
                if pack.key.last <= widest.key.last:
                    continue
            else:
                checked.clear()
            widest = pack
    except AdaCheckError as error:
        yield of_tier(error, tier.traits.name)


def _check_pack(tier: ZarrTier, pack: Pack, journal: Journal | None) -> Iterator[Finding]:
    """What is wrong with a pack, unless the journal says that nothing is."""
    key = str(pack.key)
    name = journal.name(tier, key, "pack") if journal is not None else b""
    if journal is not None and journal.holds(name, pack.nbytes):
        return
    found = settled(
        pack_blocks(tier.traits.name, tier.objects, pack), partial(_pack_again, tier, key)
    )
    yield from found
    if journal is not None and not found:
        journal.add(name)


def _pack_again(tier: ZarrTier, key: str) -> list[Finding]:
    """Another reading of a pack, if it is still there."""
    try:
        return list(pack_blocks(tier.traits.name, tier.objects, tier.load(key)))
    except RecordNotFoundError:
        return []


def pack_blocks(tier: str, objects: Objects, pack: Pack) -> Iterator[Finding]:
    """What is wrong with the records of one pack: heads, and every block's digest."""
    for step, packed in sorted(pack.records.items()):
        try:
            sealed = pack.head(step)
            offsets = array_offsets(sealed)
            for info in sealed.head.arrays:
                at = packed.offset + offsets[info.name]
                for index in range(len(info.digests)):
                    size = block_nbytes(info, index)
                    data = read_span(objects, pack.array, pack.chunk, at, at + size)
                    verify_block(info, index, data)
                    at += size
        except AdaCheckError as error:
            found = of_error(error, tier, packed.key, "block")
            yield finding(found.kind, f"{error.message} (in pack {pack.key})", tier=tier,
                          key=packed.key, path=f"{objects.path}/{pack.key}")  # fmt: skip


def _entries(tier: LmdbTier, run: str) -> Iterator[Finding]:
    """Entries of an LMDB that are neither heads of records nor pages of one."""
    shared = lmdb_open.acquire(tier.path, tier.traits.name, 0, readonly=True)
    try:
        known: set[bytes] = set()
        orphans: set[bytes] = set()
        strange: list[str] = []
        after = b""
        while True:
            with shared.env.reading() as txn:
                cursor = txn.cursor()
                more = cursor.set_range(after) if after else cursor.first()
                seen = 0
                while more and seen < _BATCH:
                    name = bytes(cursor.key())
                    _classify(name, bytes(cursor.value()[:PREFIX_BYTES]), known, orphans, strange)
                    after, seen, more = name + b"\0", seen + 1, cursor.next()
            if seen < _BATCH:
                break
    finally:
        lmdb_open.release(shared)
    for name_text in strange[:_SAMPLE]:
        yield finding("foreign", f"an entry that is no record's: {name_text}",
                      tier=tier.traits.name, path=tier.path)  # fmt: skip
    if len(strange) > _SAMPLE:
        yield finding("foreign", f"{len(strange)} entries that are no record's, in all",
                      tier=tier.traits.name, path=tier.path)  # fmt: skip
    if orphans and not run:
        yield finding("unfinished", f"pages of {len(orphans)} records without head",
                      tier=tier.traits.name, path=tier.path)  # fmt: skip


def _classify(
    name: bytes, prefix: bytes, known: set[bytes], orphans: set[bytes], strange: list[str]
) -> None:
    """Heads sort before pages, so that a page's head has been seen when it comes."""
    if name[:1] == b"h" and is_key(name[1:].decode(errors="replace")):
        known.add(prefix)
    elif name[:1] == b"p" and len(name) == 21:
        if name[1:9] not in known:
            orphans.add(name[1:9])
    elif name != MARKER_KEY:
        strange.append(repr(name[:80]))
