"""Another topology on S3: no state is uploaded, and all comes back from the bucket alone."""

from pathlib import Path

import pytest

from tests.ranks.test_beginning import Run, forked, freed
from tests.s3.server import OWNER, Server

pytestmark = pytest.mark.fault


@pytest.mark.slow
def test_a_fork_uploads_no_state(real: Server, tmp_path: Path) -> None:
    """FSDP2 on two ranks, one process, DDP: see `tests.ranks.test_beginning`."""
    legs = [("fsdp2", 2), ("one", 1), ("copies", 2)]
    env = {
        "AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1],
        "AWS_EC2_METADATA_DISABLED": "true", "ADACHECK_CACHE": str(tmp_path / "machine"),
    }  # fmt: skip
    run = Run(tmp_path, *legs[0], url=real.url(), env=env)
    run.near = tmp_path / "machine"
    newest = forked(run, legs)
    assert run.back("fsdp2", 2) == newest
    freed(run, legs, newest)
