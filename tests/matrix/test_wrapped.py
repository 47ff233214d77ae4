"""Compilers, DDP and hooks of others change nothing."""

import pytest

from tests.matrix import cases_wrapped as cases
from tests.matrix.kit import compare, prove, run


@pytest.mark.parametrize(
    "case",
    [
        cases.Compiled, cases.CompiledLater, cases.CompiledInPlace,
        pytest.param(cases.CompiledStep, marks=pytest.mark.slow), cases.Ddp, cases.DdpLater,
        cases.Hooked, cases.HookedRounded,
        cases.HookedAfter,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, wrapped as it was."""
    prove(tmp_path, case)


def test_what_is_trained_after_closing_is_not_in_the_run(tmp_path):
    """Detached after step 4, trained on and killed: step 4 is the newest, and goes on the same."""
    name = f"{cases.__name__}:{cases.Detached.__name__}"
    reference = {row["step"]: row for row in run(tmp_path, name, "reference")}
    store = (tmp_path / "store").as_uri()
    compare(run(tmp_path, name, "captured", store), reference)
    rows = run(tmp_path, name, "resumed", store)
    compare(rows, reference)
    assert (rows[0]["restored"], rows[-2]["step"]) == (4, cases.Detached.steps)
