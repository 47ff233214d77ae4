"""A tier behind a server, as a peer tier of this process sees it."""

from functools import lru_cache
from pathlib import Path

from adacheck_store.tiers import credentials
from adacheck_store.tiers.base import Tier
from adacheck_store.tiers.peer import PeerTier
from adacheck_store.tiers.pool import Peer
from adacheck_store.tiers.serve import Server


@lru_cache
def key_of(run: str) -> credentials.Credentials:
    """A key of a run, the same in the whole process."""
    return credentials.make(run)


def socket_of(path: Path) -> str:
    """The endpoint beside a tier's folder."""
    return f"unix:{path.parent / 'agent.sock'}"


class Hosted(PeerTier):
    """A peer tier that ends its server, and the tier behind, with itself."""

    def __init__(self, inner: Tier, endpoint: str, run: str = "gpt-small") -> None:
        keys = [key_of(run)] if endpoint.startswith("tls") else []
        self.inner = inner
        self.server = Server([endpoint], {"inner": inner}, credentials=keys)
        super().__init__(
            Peer(self.server.endpoints[0], credentials=next(iter(keys), None)), "inner"
        )

    def close(self) -> None:
        """Close all three."""
        super().close()
        self.server.close()
        self.inner.close()
