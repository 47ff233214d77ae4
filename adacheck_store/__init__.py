"""adacheck_store keeps a checkpoint of a PyTorch training run at every step.

Names are loaded on first use (PEP 562), so that importing adacheck_store.format costs neither
torch nor any storage library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adacheck_store.agent.crew import Agents
    from adacheck_store.optimizer_kit import register_optimizer
    from adacheck_store.policy import Retention
    from adacheck_store.trainer_hooks.attach import attach
    from adacheck_store.trainer_hooks.dcp import DcpReader
    from adacheck_store.trainer_hooks.dcp_writer import DcpWriter
    from adacheck_store.trainer_hooks.grace import Stopped

__version__ = "0.1.0"

__all__ = [
    "Agents", "DcpReader", "DcpWriter", "Retention", "Stopped", "__version__", "attach",
    "register_optimizer",
]  # fmt: skip

# Public name -> the module that defines it.
_LAZY = {
    "Agents": "adacheck_store.agent.crew",
    "DcpReader": "adacheck_store.trainer_hooks.dcp",
    "DcpWriter": "adacheck_store.trainer_hooks.dcp_writer",
    "Retention": "adacheck_store.policy",
    "Stopped": "adacheck_store.trainer_hooks.grace",
    "attach": "adacheck_store.trainer_hooks.attach",
    "register_optimizer": "adacheck_store.optimizer_kit",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
