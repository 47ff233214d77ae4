"""A step that kills one rank in every attempt: all ranks go back to the same older one."""

import pytest

from tests.ranks.worker import STEPS, Launcher, check_against

pytestmark = pytest.mark.fault


def test_all_ranks_begin_at_the_same_older_step(tmp_path):
    """Rank 1 dies in step 4, where rank 0 has not come past step 3 either."""
    launcher = Launcher(tmp_path, "ddp", 2)
    reference = launcher.reference()
    given = {rank: {"max_deaths": 1} for rank in range(2)}
    found = []
    for _ in range(3):
        attempt = launcher.start(tmp_path / "store", poisoned={1: 4}, given=given)
        attempt.processes[1].join(120)
        attempt.kill(1)
        check_against(reference, attempt)
        found.append(attempt.every("restored"))
    assert found == [[0, 0], [3, 3], [2, 2]]
    why = "steps after 2 are passed over: one attempt has died without getting past step 3"
    assert attempt.every("restored", "reasons") == [[why], [why]]
    cured = launcher.start(tmp_path / "store", given=given)
    assert cured.wait() == [0, 0]
    check_against(reference, cured)
    assert cured.every("restored") == [0, 0]
    assert cured.every("final", "digest") == [known[STEPS][0] for known in reference]
