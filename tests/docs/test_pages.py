"""What the documents say is so: code runs, links lead somewhere, words are ours."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import adacheck_store
from adacheck_store.cli import main
from tests.docs.pages import LANGUAGES, PAGES, ROOT, blocks, without_code
from tests.forked import run

STORE = "/data/ckpt"
"""The store in the examples."""

FORBIDDEN = r"\b(checkpoint files?|snapshots?|HEAD|epochs?|commit(s|ted|ting)?)\b"


def page_id(path: Path) -> str:
    """Name of a page."""
    return path.relative_to(ROOT).as_posix()


def pieces() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A small model, its optimizer and a schedule."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)


def run_example(text: str, url: str, batches: int) -> torch.nn.Module:
    """Run the README's loop in a world that has what it takes for granted."""
    torch.manual_seed(1)
    model, optimizer, scheduler = pieces()
    data = torch.utils.data.DataLoader(torch.randn(batches, 8), batch_size=1, shuffle=True)

    def train_step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()

    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": data,
             "train_step": train_step}  # fmt: skip
    code = text.replace(f"file://{STORE}", url)
    assert code != text
    exec(compile(code, "README.md", "exec"), names)
    names.pop("__builtins__")
    assert names["start"] in (0, batches)
    return model


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that the README's example has made."""
    folder = tmp_path_factory.mktemp("readme") / "ckpt"
    code = next(b.text for b in blocks(ROOT / "README.md") if b.language == "python")
    first = run_example(code, folder.as_uri(), 24)
    again = run_example(code.replace("ckpt.batches(loader)", "[]"), folder.as_uri(), 24)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_are_sound(page: Path) -> None:
    """Every block has a language we know; Python and shell parse."""
    for block in blocks(page):
        assert block.language in LANGUAGES, block
        if block.language == "python":
            ast.parse(block.text)
        elif block.language.startswith("sh"):
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)


def test_tasks_of_the_readme_exist() -> None:
    """Every task that a page runs is one of ./run and of make."""
    script = (ROOT / "run").read_text(encoding="utf-8")
    tasks = set(re.findall(r"^    ([a-z]+)\)", script, re.MULTILINE))
    shown = re.findall(r"^  ([a-z]+) ", script, re.MULTILINE)
    made = re.search(r"^TASKS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert made is not None
    assert made[1].split() == shown
    assert set(shown) == tasks
    for page in PAGES:
        found = re.findall(r"(?:\./run|\bmake) ([a-z]+)", "".join(b.text for b in blocks(page)))
        assert set(found) <= tasks, page


def test_commands_of_the_readme_run(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `adacheck-store` line, against a store; demo, agents and plan have tests elsewhere."""
    monkeypatch.chdir(tmp_path)
    seen = set()
    for block in blocks(ROOT / "README.md"):
        for line in block.text.splitlines():
            words = line.partition("#")[0].replace(STORE, str(store)).split()
            if block.language != "sh" or words[:1] != ["adacheck-store"]:
                continue
            seen.add(words[1])
            arguments = (
                [*words[1:], "--help"] if words[1] in ("demo", "agent", "plan") else words[1:]
            )
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, f"{line}\n{result.output}"
    assert seen == set(main.list_commands(None))  # type: ignore[arg-type]
    assert (tmp_path / "step20.safetensors").exists()


def test_python_of_the_other_pages_runs(tmp_path: Path) -> None:
    """Each block of a page but README and tutorial is a program."""
    for page in PAGES:
        if page.name in ("README.md", "tutorial.md"):
            continue
        for block in blocks(page):
            if block.language == "python":
                run_python(block.text, tmp_path)


def run_python(code: str, folder: Path) -> None:
    """Run a program in a folder, in a process of its own."""
    file = folder / "block.py"
    file.write_text(code)
    ended, said = run([str(file)])
    assert ended == 0, said


def test_generated_pages_are_current() -> None:
    """Reference, errors and the map say what the code says: else `./run docs`."""
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reference.py", "--check"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    """Files exist, and so do the headings named in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [title.lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_words_are_ours(page: Path) -> None:
    """None of the words that are never used, but where they are listed."""
    text = re.sub(r"^Never: .*$", "", without_code(page), flags=re.MULTILINE)
    assert not re.findall(FORBIDDEN, text), page


def test_the_changelog_knows_this_version() -> None:
    """The version in the code has an entry."""
    assert f"## {adacheck_store.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
