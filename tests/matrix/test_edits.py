"""Edits outside the optimizer, second modules, parametrizations and dtypes."""

import pytest

from tests.matrix import cases_edits as cases
from tests.matrix.kit import prove


@pytest.mark.parametrize(
    "case",
    [
        cases.Clipped, cases.QkClipped, cases.MaxNorm, cases.Averaged, cases.AveragedEqually,
        cases.WeightNorm, cases.SpectralNorm, cases.Lora, cases.Dtypes,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, whatever else has changed the tensors."""
    assert "exact" in prove(tmp_path, case)[0]["certificate"]
