"""Foreign states by flat keys, as torch.distributed.checkpoint has them.

``model.<name>``, ``optimizer.state.<name>.<role>``, ``optimizer.param_groups.<number>.<option>``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adacheck_store.format.errors import UnsupportedError

from .foreign import Foreign, Found, spec_for

GROUPS = "param_groups"


def under(*keys: str) -> str:
    """What keys in a state begin with; an empty key is none: then the state is the model's."""
    return "".join(f"{key}." for key in keys if key)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of model and optimizer in a state; what lies under others is neither's."""

    model: str = "model"
    optimizer: str = "optimizer"

    def owner(self, key: str, *, value: bool = False) -> str:
        """``model``, ``state``, ``groups``, or empty for what is neither's.

        A ``value``, which is no tensor, is not the model's either (``_extra_state``).
        """
        if key.startswith(under(self.optimizer, "state")):
            return "state"
        if key.startswith(under(self.optimizer) + GROUPS):
            return "groups"
        return "model" if key.startswith(under(self.model)) and not value else ""

    def named(self, keys: Iterable[str]) -> dict[str, str]:
        """The model's among some keys: its name for each."""
        start = len(under(self.model))
        return {key: key[start:] for key in keys if self.owner(key) == "model"}

    def foreign(
        self, pieces: Mapping[str, Found], values: Mapping[str, Any], optimizer: str,
        aliases: Mapping[str, str],
    ) -> Foreign:  # fmt: skip
        """The state of tensors and of other values by key; ``aliases`` as in `Foreign`.

        Raises `UnsupportedError` for parameter groups in another form.
        """
        states: dict[str, dict[str, Found]] = defaultdict(dict)
        counters: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, name, role in self._of_state(pieces):
            states[name][role] = pieces[key]
        for key, name, role in self._of_state(values):
            if values[key] is not None:
                counters[name][role] = values[key]
        model = {
            name: pieces[key] for key, name in self.named(pieces).items() if name not in aliases
        }
        return Foreign(
            model=model, states=states, counters=counters, optimizer=optimizer, aliases=aliases,
            groups=self.groups(pieces, values),
        )  # fmt: skip

    def groups(
        self, pieces: Mapping[str, Found], values: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The parameter groups: of each number one, or before torch 2.4 all under one key."""
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for key in (*pieces, *values):
            if self.owner(key) != "groups":
                continue
            value = values[key] if key in values else pieces[key].read()
            rest = key.removeprefix(under(self.optimizer) + GROUPS)
            number, _, name = rest.removeprefix(".").partition(".")
            if not rest and isinstance(value, list):
                found.update(enumerate(value))
            elif number.isdigit() and name and "." not in name:
                found[int(number)][name] = value
            else:
                raise UnsupportedError(
                    f"{key[:200]!r} is not of a parameter group",
                    hint="do without flatten_optimizer_state_dict, and without dicts in groups",
                )
        if any("params" not in group for group in found.values()):
            raise UnsupportedError(
                "a parameter group without the names of its parameters",
                hint="take the state by torch.distributed.checkpoint.state_dict.get_state_dict",
            )
        return [found[number] for number in sorted(found)]

    def _of_state(self, keys: Iterable[str]) -> list[tuple[str, str, str]]:
        """Keys of the optimizer's state, each with the parameter and role that it is of."""
        start = len(under(self.optimizer, "state"))
        found = []
        for key in keys:
            if self.owner(key) == "state":
                name, _, role = key[start:].rpartition(".")
                found.append((key, name, role))
        return found


def with_counters(foreign: Foreign) -> Foreign:
    """Of the tensors of optimizer's state those that its class counts by become counters."""
    spec = spec_for(foreign)
    counted = spec.scalars if spec is not None else ()
    states: dict[str, dict[str, Found]] = {}
    counters = {name: dict(values) for name, values in foreign.counters.items()}
    for name, roles in foreign.states.items():
        states[name] = {role: found for role, found in roles.items() if role not in counted}
        for role in roles.keys() & set(counted):
            counters.setdefault(name, {})[role] = roles[role].read().reshape(()).clone()
    return replace(foreign, states=states, counters=counters)
