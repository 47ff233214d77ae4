"""A decoder of records that knows nothing but the tables of FORMAT.md: struct, json, hashlib."""

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "format" / "FORMAT.md"
_TABLE = re.compile(r"<!-- table: ([a-z ]+) -->\n\n((?:\|.*\n)+)")
Row = dict[str, str]


class Refused(Exception):
    """The record is not what the tables say."""


def tables(text: str) -> dict[str, list[Row]]:
    """Every marked table: a list of rows, each a mapping of column to cell without backticks."""
    found = {}
    for name, block in _TABLE.findall(text):
        lines = [line.strip().strip("|").split("|") for line in block.splitlines()]
        cells = [[cell.strip().replace("`", "") for cell in line] for line in lines]
        assert name not in found, name
        assert all(len(line) == len(cells[0]) for line in cells), name
        found[name] = [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]
    return found


def need(right: object, what: str) -> None:
    """Refuse the record unless ``right``."""
    if not right:
        raise Refused(what)


class Decoder:
    """Decodes a record by the tables of a document."""

    def __init__(self, text: str) -> None:
        self.tables = tables(text)
        self.limits = {row["limit"]: int(row["value"]) for row in self.tables["limits"]}
        self.dtypes = {row["dtype"]: row for row in self.tables["dtypes"]}
        self.kinds = {row["kind"]: row for row in self.tables["kinds"]}
        self.words = {row["word"]: row["regular expression"] for row in self.tables["words"]}

    def column(self, table: str, name: str) -> list[str]:
        """A column of a table."""
        return [row[name] for row in self.tables[table]]

    def fields(self, data: bytes) -> dict[str, bytes]:
        """Cut a file by the framing table."""
        found: dict[str, bytes] = {}
        numbers: dict[str, int] = {}
        end = 0
        for row in self.tables["framing"]:
            at = sum(numbers[w] if w in numbers else int(w) for w in row["offset"].split(" + "))
            size = row["size"]
            need(at == end, f"{row['field']} follows what is before it")
            stop = len(data) if size == "rest" else at + (numbers.get(size) or int(size))
            found[row["field"]] = data[at:stop]
            need(stop <= len(data), "truncated")
            if size == "8":
                (numbers[row["field"]],) = struct.unpack("<Q", data[at:stop])
            end = stop
        return found

    def decode(self, data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Head and arrays of a record; raises `Refused`."""
        found = self.fields(data)
        need(len(found["header"]) % 8 == 0, "padding")
        need(len(found["header"]) <= self.limits["header_bytes"], "header too large")
        header = json.loads(found["header"])
        metadata = header.pop("__metadata__")
        need(list(metadata) == self.column("metadata", "key"), "metadata")
        raw = metadata["adacheck"].encode()
        digest = hashlib.blake2b(raw, digest_size=self.limits["id_bytes"]).hexdigest()
        need(digest == metadata["id"], "id")
        need(len(metadata["info"]) <= self.limits["info_bytes"], "info")
        head = json.loads(raw)
        self._head(head)
        arrays = self._arrays(head, header, found["arrays"])
        self._body(head)
        return head, arrays

    def _head(self, head: dict[str, Any]) -> None:
        need(set(self.column("head", "field")) <= head.keys(), "fields of the head")
        meanings = {row["field"]: row["meaning"] for row in self.tables["head"]}
        need(head["format"] == meanings["format"], "format")
        need(head["version"] == int(meanings["version"]), "version")
        kind = self.kinds[head["kind"]]
        for name in ("term", "part", "step", "parent", "manifest", "layout"):
            need(self._fits(head[name], kind[name]), f"{name} of a {head['kind']}")
        need(re.fullmatch(self.words["<run>"], head["run"]), "run")
        need(kind["arrays"] == "any" or not head["arrays"], "arrays")

    def _fits(self, value: Any, shape: str) -> bool:
        if shape == "id or empty":
            return self._fits(value, "id") or self._fits(value, "empty")
        if shape in ("null", "empty"):
            return bool(value == {"null": None, "empty": ""}[shape])
        if shape == "step":
            return type(value) is int and 0 <= value <= self.limits["step"]
        return isinstance(value, str) and bool(re.fullmatch(self.words[f"<{shape}>"], value))

    def _arrays(
        self, head: dict[str, Any], header: dict[str, Any], data: bytes
    ) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        at = 0
        need(list(header) == [item["name"] for item in head["arrays"]], "entries of the header")
        for item in head["arrays"]:
            need(set(item) == set(self.column("array", "field")), "fields of an array")
            entry = header[item["name"]]
            need(list(entry) == self.column("entries", "key"), "entry")
            dtype = self.dtypes[item["dtype"]]
            size = item["elements"] * int(dtype["bytes"])
            shown = size if dtype["in the header"] != item["dtype"] else item["elements"]
            need(entry["dtype"] == dtype["in the header"], "dtype")
            need(entry["shape"] == [shown], "shape")
            need(entry["data_offsets"] == [at, at + size], "data_offsets")
            need(len(item["digests"]) == -(-size // self.limits["block_bytes"]), "digests")
            need(all(len(d) == 2 * self.limits["digest_bytes"] for d in item["digests"]), "digest")
            found[item["name"]] = data[at : at + size]
            at += size
        need(at == len(data), "bytes after the arrays")
        return found

    def _body(self, head: dict[str, Any]) -> None:
        kind, body = head["kind"], head["body"]
        if kind == "claim":
            return self._object(body, "body claim excuse") if body else None
        more = self.column("body base bounded", "field") if body.get("class") == "bounded" else []
        if kind == "manifest" and body.keys() - set(self.column("body manifest", "field")):
            more = self.column("body manifest redundancy", "field")
            self._redundancy(*(body[field] for field in more))
        self._object({key: body[key] for key in body if key not in more}, f"body {kind}")
        for path, table in (
            (("sections",), "section"), (("sections", "slices"), "slice"), (("parts",), "part"),
            (("updates",), "update"), (("states",), "state"),
        ):  # fmt: skip
            for item in self._below(body, path):
                self._object(item, table)
        encodings = self.column("encodings", "encoding")
        for update in body.get("updates", ()):
            need(all(grad[2] in encodings for grad in update["grads"]), "encoding")
        self._offsets(body)
        return self._tags(body)

    def _redundancy(self, found: dict[str, Any]) -> None:
        self._object(found, "redundancy")
        for ground in found["grounds"]:
            self._object(ground, "ground")
        for part in found["parts"]:
            self._object(part, "held part")

    def _below(self, body: Any, path: tuple[str, ...]) -> list[Any]:
        items = [body]
        for name in path:
            below = [item.get(name, []) for item in items]
            items = [x for b in below for x in (b.values() if isinstance(b, dict) else b)]
        return items

    def _object(self, item: dict[str, Any], table: str) -> None:
        need(item.keys() == set(self.column(table, "field")), f"fields of {table}")

    def _offsets(self, body: dict[str, Any]) -> None:
        """Pieces lie at multiples of the alignment."""
        found = [s["offset"] for s in self._below(body, ("sections", "slices"))]
        found += [grad[3] for update in body.get("updates", ()) for grad in update["grads"]]
        need(all(offset % self.limits["align"] == 0 for offset in found), "offset")
        if len(found) > 1 and "sections" in body:
            for section in body["sections"]:
                self._packed(section["slices"])

    def _packed(self, slices: list[dict[str, Any]]) -> None:
        end = 0
        for piece in slices:
            need(piece["offset"] == end, "offset of a slice")
            size = 0
            for box in piece["boxes"]:
                count = 1
                for start, stop in box:
                    count *= stop - start
                size += count
            size += piece["flat"][1] - piece["flat"][0] if piece["flat"] else 0
            end = -(-(end + size) // self.limits["align"]) * self.limits["align"]

    def _tags(self, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                need(not key.startswith("$") or key in self.column("typed", "tag"), "tag")
            if "$x" in value:
                dtype, data = value["$x"]
                need(len(data) == 2 * int(self.dtypes[dtype]["bytes"]), "scalar")
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                self._tags(item)
