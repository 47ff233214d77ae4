"""Compilers, DDP and hooks of others change nothing."""

import pytest

from tests.matrix import cases_wrapped as cases
from tests.matrix.kit import prove


@pytest.mark.parametrize(
    "case",
    [
        cases.Compiled, cases.CompiledLater, cases.CompiledInPlace,
        pytest.param(cases.CompiledStep, marks=pytest.mark.slow), cases.Ddp, cases.DdpLater,
        cases.Hooked, cases.HookedRounded,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, wrapped as it was."""
    prove(tmp_path, case)
