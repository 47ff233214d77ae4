"""Rates, loaders, generators and batches fetched ahead."""

import pytest

from tests.matrix import cases_loops as cases
from tests.matrix.kit import prove


@pytest.mark.parametrize(
    "case",
    [
        cases.TensorRate, cases.Groups, cases.ByHand, cases.Noisy, cases.Rematerialised,
        cases.RematerialisedReentrant, cases.Loaded, cases.LoadedNoisy, cases.FetchedAhead,
        cases.LoadedAhead, cases.Tied,
    ],
)  # fmt: skip
def test_restored_bit_for_bit(tmp_path, case):
    """Killed and restored, the loop goes on with the same batches, rates and noise."""
    prove(tmp_path, case)
