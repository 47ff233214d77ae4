"""Code blocks of the documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LANGUAGES = {"python", "sh", "sh skip", "text"}

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The file a Python block is, if its first line names one."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found and self.language == "python" else ""


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    return [Block(*found) for found in _BLOCK.findall(path.read_text(encoding="utf-8"))]


def without_code(path: Path) -> str:
    """A page's prose."""
    return re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", path.read_text(encoding="utf-8")))
