"""FORMAT.md is what the code does: its tables decode the golden records, and nothing else does."""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given

from adacheck_store.format import canonical, dtypes, head, ids, keys, layout, record, strict
from adacheck_store.format.bodies import ENCODINGS, ORIGINS
from adacheck_store.format.check import GRAD_DTYPES
from adacheck_store.tiers.zarr_packs import pack_document
from tests.format.doc_decoder import DOCUMENT, Decoder, Refused, tables
from tests.format.forge import NAMES, golden_bytes, golden_head
from tests.format.test_keys import KEYS

TEXT = DOCUMENT.read_text()
TABLES = tables(TEXT)
DECODER = Decoder(TEXT)
BYTES = {name: golden_bytes(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_document_decodes_golden_record(name: str) -> None:
    """A decoder that knows the tables alone gives the head and arrays that ours gives."""
    found, arrays = DECODER.decode(BYTES[name])
    ours = record.decode_record(BYTES[name])
    assert found == golden_head(name) == canonical.loads(ours.sealed.raw)
    assert arrays == {key: bytes(view) for key, view in ours.arrays.items()}


def decodes(text: str) -> bool:
    """True if a document's tables still decode every golden record to what it is."""
    try:
        decoder = Decoder(text)
        for data in BYTES.values():
            decoder.decode(data)
    except (Refused, KeyError, ValueError, TypeError, AssertionError, UnicodeDecodeError):
        return False
    return True


def changed(table: str, row: int, column: str, change: Callable[[str], str]) -> str:
    """The document with one cell of a table changed."""
    start = TEXT.index(f"<!-- table: {table} -->")
    lines = TEXT[start:].splitlines(keepends=True)
    place = list(TABLES[table][0]).index(column) + 1
    cells = lines[4 + row].split("|")
    new = change(cells[place])
    assert new != cells[place]
    cells[place] = new
    lines[4 + row] = "|".join(cells)
    return TEXT[:start] + "".join(lines)


def shifted(cell: str) -> str:
    """A cell with its last number one larger."""
    *_, last = re.finditer(r"[0-9]+", cell)
    return f"{cell[: last.start()]}{int(last[0]) + 1}{cell[last.end() :]}"


def numbers(table: str, column: str, rows: list[str] | None = None) -> list[tuple[str, int, str]]:
    """Cells of a table's column that hold a number."""
    first = next(iter(TABLES[table][0]))
    return [
        (table, index, column)
        for index, row in enumerate(TABLES[table])
        if re.search(r"[0-9]", row[column]) and (rows is None or row[first] in rows)
    ]


USED = ["BOOL", "U8", "BF16", "F16", "F32", "I64", "F64", "C64"]
OFFSETS = [
    *numbers("framing", "offset"), *numbers("framing", "size"), *numbers("dtypes", "bytes", USED),
    *numbers("limits", "value", ["id_bytes", "digest_bytes", "align"]),
    *numbers("head", "meaning", ["version"]),
]  # fmt: skip


def test_document_as_it_stands_decodes() -> None:
    """The judgement used below accepts the document itself."""
    assert decodes(TEXT)


@pytest.mark.parametrize(("table", "row", "column"), OFFSETS)
def test_a_shifted_number_is_noticed(table: str, row: int, column: str) -> None:
    """With one offset or size changed in the document, golden records no longer decode."""
    assert not decodes(changed(table, row, column, shifted))


FIELD_TABLES = [
    name for name, rows in TABLES.items()
    if next(iter(rows[0])) in ("field", "key", "tag", "kind") and name not in ("packed", "framing")
]  # fmt: skip


@pytest.mark.parametrize("table", FIELD_TABLES)
def test_a_renamed_field_is_noticed(table: str) -> None:
    """With one field, tag or kind renamed in the document, golden records no longer decode."""
    first = next(iter(TABLES[table][0]))
    for row in range(len(TABLES[table])):
        assert not decodes(changed(table, row, first, lambda cell: cell.replace("`", "`x", 1)))


def test_a_changed_place_is_noticed() -> None:
    """With one kind's place or link changed, golden records no longer decode."""
    for index, row in enumerate(TABLES["kinds"]):
        for column, cell in row.items():
            if column in ("kind", "arrays") or cell == "id or empty":
                continue
            other = "empty" if cell != "empty" else "id"
            assert not decodes(changed("kinds", index, column, lambda _, new=other: f" {new} "))


def test_limits_are_those_of_the_code() -> None:
    """Every limit is the constant that is enforced."""
    assert DECODER.limits == {
        "id_bytes": 32, "digest_bytes": 16, "block_bytes": ids.BLOCK_BYTES,
        "header_bytes": record.MAX_HEADER_BYTES, "head_bytes": head.MAX_HEAD_BYTES,
        "info_bytes": head.MAX_INFO_BYTES, "array_bytes": dtypes.MAX_ARRAY_BYTES,
        "dimensions": dtypes.MAX_DIMS, "depth": canonical.MAX_DEPTH,
        "openings": canonical.MAX_OPENINGS,
        "value_depth": canonical.MAX_VALUE_DEPTH, "integer": canonical.MAX_INT,
        "integer_bits": canonical.MAX_INT_BITS, "name_characters": strict.MAX_TEXT,
        "array_name_characters": head.MAX_NAME, "step": keys.MAX_STEP,
        "number": keys.MAX_NUMBER, "align": layout.ALIGN,
    }  # fmt: skip


def test_dtypes_are_those_of_the_code() -> None:
    """Every dtype has its size and its name in the header."""
    sizes = {row["dtype"]: int(row["bytes"]) for row in TABLES["dtypes"]}
    assert sizes == dtypes.ITEM_BYTES
    shown = {row["dtype"] for row in TABLES["dtypes"] if row["in the header"] == row["dtype"]}
    assert shown == dtypes.SAFETENSORS_DTYPES.keys()
    assert {row["in the header"] for row in TABLES["dtypes"]} == shown


def test_kinds_and_encodings_are_those_of_the_code() -> None:
    """The document leaves out no kind, encoding or origin."""
    assert DECODER.column("kinds", "kind") == list(head.KINDS)
    assert DECODER.column("encodings", "encoding") == list(ENCODINGS)
    kept = {row["encoding"]: row["dtype of the array"] for row in TABLES["encodings"]}
    assert {name: kept[name] for name in GRAD_DTYPES} == GRAD_DTYPES
    assert all(f"`{origin}`" in TEXT for origin in ORIGINS)
    assert DECODER.column("head", "meaning")[-2].endswith(ids.DIGEST_ALGORITHM)


@given(KEYS)
def test_key_grammar_is_that_of_the_code(key: keys.Key) -> None:
    """Every key fits exactly one line of the document's grammar: its kind's."""
    name = str(key)
    found = []
    for row in TABLES["keys"]:
        pattern = re.escape(row["key"]).replace(r"\-", "-")
        for word, expression in DECODER.words.items():
            pattern = pattern.replace(word, expression)
        if re.fullmatch(pattern, name):
            found.append(row["what lies there"])
    packed = "delta" if key.part.startswith("p") else "extra"
    kinds = {"log": "claim, floor, tag", "pack": f"pack of {packed}s"}
    assert found == [kinds.get(key.kind, key.kind)]


def test_worked_example_is_the_golden_claim() -> None:
    """The hexadecimal example is a golden file, and the head below it its head."""
    section = TEXT[TEXT.index("## 13.") :]
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+)", section, re.MULTILINE)
    assert [int(at, 16) for at, _ in rows] == list(range(0, len(BYTES["claim"]), 16))
    assert bytes.fromhex("".join(row for _, row in rows)) == BYTES["claim"]
    (raw,) = re.findall(r"```json\n(.*)\n```", section)
    assert raw.encode() == record.decode_header(BYTES["claim"]).raw
    assert json.loads(raw)["run"] in section


def test_invariants_are_numbered_and_their_rules_exist() -> None:
    """Identifiers are consecutive, levels are MUST or SHOULD, rules are those of the code."""
    found = re.findall(
        r"^\| (INV-[0-9]{2}) \| (MUST|SHOULD) \| ([^|]+?) \|(.*)$", TEXT, re.MULTILINE
    )
    assert [name for name, *_ in found] == [f"INV-{n:02d}" for n in range(1, len(found) + 1)]
    assert len(found) == TEXT.count("| INV-")
    assert all(text.endswith(".") for _, _, text, _ in found)
    named = {rule for *_, cell in found for rule in re.findall(r"`([a-z0-9-]+)`", cell)}
    source = "".join(path.read_text() for path in DOCUMENT.parent.glob("*.py"))
    raised = set(re.findall(r'rule="([a-z0-9-]+)"', source))
    assert named - {"base_every"} == raised - {"array-missing"}


def test_packs_are_those_of_the_zarr_tier() -> None:
    """A pack's attributes, and those of each record in it, have the names that are written."""
    sealed = record.decode_header(BYTES["delta"])
    attributes = json.loads(pack_document(0, 0, [("key", sealed, 0)]))["attributes"]
    assert set(attributes) == set(DECODER.column("pack", "attribute"))
    assert set(attributes["records"][0]) == set(DECODER.column("packed", "field"))
