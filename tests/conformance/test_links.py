"""What a tier remembers of the layouts and manifests it holds, while another thread deletes."""

from typing import Any

from adacheck_store.tiers.intake import Links
from adacheck_store.tiers.memory import MemoryTier
from tests.conformance.records import World


class _Forgetful(MemoryTier):
    """Another thread's delete falls right after every look at a head."""

    links: Links

    def head(self, key: str) -> Any:
        sealed = super().head(key)
        self.links.forget()
        return sealed


def test_a_delete_meanwhile_does_not_hide_what_is_held() -> None:
    """Found by the two thousand steps: a put was refused beside a prune."""
    world, tier = World(), _Forgetful()
    tier.links = Links(tier)
    tier.put(world.roots())
    tier.links.check([world.delta(1).record.sealed])
