"""Chaos: ten rounds of a seed in every run, two hundred of another in the slow profile."""

from pathlib import Path

import pytest

from tests.chaos.play import play
from tests.chaos.strikes import KINDS

pytestmark = pytest.mark.fault


@pytest.mark.parametrize(
    ("seed", "count"),
    [(2238, 10), pytest.param(7, 200, marks=[pytest.mark.slow, pytest.mark.timeout(0)])],
)
def test_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int) -> None:
    """What was acknowledged and a survivor can produce comes back, bit for bit; fsck says so."""
    result = play(seed, count, tmp_path, print)
    with capsys.disabled():
        print(f"\n{result}")
    assert result.rounds == count
    missing = {kind for kind in KINDS if not result.counts[kind]}
    assert missing <= {"cut link"}  # no link can be cut where the kernel makes no networks
