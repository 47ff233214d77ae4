"""Edits outside the optimizer, second modules, parametrizations and dtypes."""

import pytest

from tests.matrix import cases_edits as cases
from tests.matrix.kit import compare, prove, run


@pytest.mark.parametrize(
    "case",
    [
        cases.Clipped, cases.QkClipped, cases.MaxNorm, cases.Averaged, cases.AveragedEqually,
        cases.WeightNorm, cases.SpectralNorm, cases.Lora, cases.Dtypes,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, whatever else has changed the tensors."""
    prove(tmp_path, case)


@pytest.mark.parametrize("case", [cases.DataEdited, cases.DataClipped])
def test_edits_through_data_are_never_taken_for_training(tmp_path, case):
    """No counter tells: the fold does, a base follows, and no wrong state is ever given."""
    name = f"{case.__module__}:{case.__name__}"
    reference = {row["step"]: row for row in run(tmp_path, name, "reference")}
    store = (tmp_path / "store").as_uri()
    compare(run(tmp_path, name, "captured", store), reference)
    given = {}
    for at in (None, 6, 5, 4, 3, 2):  # a restore forks the run: the newest first
        rows = run(tmp_path, name, "looked", store, at)
        compare(rows, reference)
        if "restored" in rows[0]:
            given[rows[0]["restored"]] = rows[0]["certificate"]
    edited_once = case is cases.DataEdited
    assert sorted(given) == ([2, 5, 6, 8] if edited_once else [5])
    assert "is not what the trainer had" in given[5]
    compare(run(tmp_path, name, "resumed", store), reference)
