"""What a tier remembers of the layouts and manifests it holds, while another thread deletes."""

from adacheck_store.tiers.intake import Links
from adacheck_store.tiers.memory import MemoryTier
from tests.conformance.records import World


class _Forgotten(set[str]):
    """Another thread's delete falls right after everything that is remembered."""

    def add(self, item: str) -> None:
        self.clear()


def test_a_delete_meanwhile_does_not_hide_what_is_held() -> None:
    """Found by the two thousand steps: a put was refused beside a prune."""
    world, tier = World(), MemoryTier()
    tier.put(world.roots())
    links = Links(tier)
    links._held = _Forgotten()
    links.check([world.delta(1).record.sealed])
