"""An agent that has chosen a floor for its LMDB, and waits before it goes on to write it.

Called as ``python -m tests.agent.held FOLDER CLAIM_S agent ...``. In the folder it makes ``chosen``
with the floor's step, waits for ``go``, and says in ``came`` what came of it. A claim that has been
silent for CLAIM_S is dead to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adacheck_store import terms
from adacheck_store.agent.prune import Prunes
from adacheck_store.cli import main
from adacheck_store.retention import FloorChoice
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.lmdb import LmdbTier
from tests.waits import until


def holding(folder: Path, put: Callable[..., bool]) -> Callable[..., bool]:
    """What writes floors, but the first one above 0 into an LMDB as told above."""

    def held(prunes: Any, tier: Tier, term: str, choice: FloorChoice) -> bool:
        if not isinstance(tier, LmdbTier) or not choice.step or (folder / "chosen").exists():
            return put(prunes, tier, term, choice)
        (folder / "chosen").write_text(str(choice.step))
        until((folder / "go").exists, "it may go on")
        came = "nothing"
        try:
            done = put(prunes, tier, term, choice)
            came = "written" if done else "refused"
        except Exception as error:
            came = f"{type(error).__name__}: {error}"
            raise
        finally:
            (folder / "came").write_text(came)
        return done

    return held


if __name__ == "__main__":
    place, claim_s = Path(sys.argv.pop(1)), float(sys.argv.pop(1))
    Prunes._put = holding(place, Prunes._put)  # type: ignore[method-assign]
    terms.CLAIM_S = claim_s
    main()
