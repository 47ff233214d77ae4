"""Compact, restore, fsck and repair stream: their memory does not grow with the part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adacheck_store.format.head import ArrayInfo
from adacheck_store.format.ids import block_count
from adacheck_store.format.record import block_nbytes
from adacheck_store.tiers.blocks import span
from adacheck_store.tiers.zarr_chunks import read_span

MIB = 1 << 20


def call(*arguments: object, timeout_s: float) -> list[float]:
    """Run the helper in a child; the numbers it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.big", *map(str, arguments)], check=False,
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def measure(root: Path, state_mib: int, timeout_s: float) -> dict[str, list[float]]:
    """Most RssAnon in MiB, that before, peak RSS, seconds: of each verb."""
    url, elements = (root / "store").as_uri(), state_mib * MIB // 12 // MIB * MIB
    call("make", url, elements, timeout_s=timeout_s)
    found = {"restore": call("restore", url, root / "out.safetensors", timeout_s=timeout_s)}
    (root / "out.safetensors").unlink()
    found["fsck"] = call("fsck", url, timeout_s=timeout_s)
    found["compact"] = call("compact", url, timeout_s=timeout_s)
    return found


def measure_repair(root: Path, state_mib: int, timeout_s: float) -> list[float]:
    """The same of a repair, of a base and a delta that are damaged, and one that is lost."""
    url, elements = (root / "store").as_uri(), state_mib * MIB // 12 // MIB * MIB
    call("make", url, elements, timeout_s=timeout_s)
    call("harm", url, timeout_s=timeout_s)
    return call("repair", url, timeout_s=timeout_s)


class Sizes:
    """Objects of which only names, places and lengths are known."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def get(self, name: str, start: int, length: int) -> bytes:
        """Bytes that say nothing."""
        self.asked.append((name, start, length))
        return bytes(length)


def test_places_beyond_two_and_four_gigabytes() -> None:
    """Nothing is counted in 32 bits: blocks, chunks, offsets in a record."""
    for gib in (2, 4, 5):
        at = gib << 30
        info = ArrayInfo(name="s0/param", dtype="U8", elements=at + 100, digests=())
        assert block_count(info.nbytes) == (at >> 20) + 1
        assert block_nbytes(info, at >> 20) == 100
        assert span(info, at >> 20, 1) == (at, at + 100)
        objects = Sizes()
        chunk = 8 * MIB
        assert len(read_span(objects, "a", chunk, at - 50, at + 100)) == 150
        index = at // chunk
        assert objects.asked == [
            (f"a/c/{index - 1}", chunk - 50, 50), (f"a/c/{index}", 0, 100)
        ]  # fmt: skip


def test_a_part_of_a_quarter_gigabyte(tmp_path: Path) -> None:
    found = measure(tmp_path, 264, 200)
    print(found)
    for verb, (most, before, _, _) in found.items():
        assert most - before < 200, f"{verb} took {most - before} MiB"


def test_a_repair_of_a_quarter_gigabyte(tmp_path: Path) -> None:
    most, before, _, _ = measure_repair(tmp_path, 264, 200)
    print(most, before)
    assert most - before < 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_repair_of_three_times_that_takes_no_more(tmp_path: Path) -> None:
    taken = []
    for mib in (264, 792):
        folder = tmp_path / str(mib)
        folder.mkdir()
        most, before, _, _ = measure_repair(folder, mib, 600)
        taken.append(most - before)
    print(taken)
    assert taken[1] < taken[0] + 32, taken


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_part_of_six_gigabytes(tmp_path: Path) -> None:
    found = measure(tmp_path, 6240, 1500)  # each array more than 2 GiB
    print(found)
    for verb, (most, before, _, _) in found.items():
        assert most < 1024, f"{verb} took {most} MiB"
        assert most - before < 200, f"{verb} took {most - before} MiB more than its imports"
