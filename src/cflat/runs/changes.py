"""What may change between the parts of a run that is resumed: where things lie and what computes, never the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cflat._errors import ConfigError
from cflat._files import plain_values
from cflat.config.documents import flatten, merge
from cflat.config.run_config import RunConfig, parse_config

PLACES = ("data.root", "backbone.weights", "backbone.checkpointing")
"""Images are compared by content, weights come from the checkpoint, and gradients are the same by either way."""
LOADING = ("data.workers", "data.cache_mib")
"""How images come into memory, which changes no bit of them."""
PRECISION = "runtime.precision"
"""The only key of ``runtime`` that is part of what is computed; the number of ranks is compared itself."""


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of this dotted key."""
    return key in (*PLACES, *LOADING) or (key.startswith("runtime.") and key != PRECISION)


def identity(config: RunConfig) -> dict[str, Any]:
    """Return what makes a run this one and no other, by dotted key.

    Of ``folder:PATH`` and the like only the kind counts: the images there are compared by content.
    """
    values = {key: value for key, value in flatten(config.to_dict()).items() if not may_change(key)}
    return {**values, "data.name": config.data.name.partition(":")[0]}


def with_newer_defaults(begun: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the identity of a run as it was written, with the defaults of settings that are newer than the run."""
    old = {key: _known(key, value, begun) for key, value in config.to_dict().items()}
    return {**plain_values(identity(parse_config(old))), **begun}


def _known(key: str, value: Any, begun: Mapping[str, Any]) -> Any:
    """Leave out settings that a run's identity ought to have and does not."""
    if not isinstance(value, Mapping):
        return value
    names = {name: f"{key}.{name}" for name in value}
    return {name: value[name] for name, full in names.items() if full in begun or may_change(full)}


def change_config(config: RunConfig, layer: Mapping[str, Any]) -> RunConfig:
    """Lay settings over the configuration of a run that is to go on; one that makes it another run is refused."""
    changed = parse_config(merge(config.to_dict(), layer))
    before, after = identity(config), identity(changed)
    for key in (*after, *before):
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"{key} cannot be changed from {before.get(key)!r:.80} to {after.get(key)!r:.80} on resume: that would "
                f"be another run. What can: {', '.join((*PLACES, *LOADING))}, and runtime.* but {PRECISION}."
            )
    return changed


def changed_keys(config: RunConfig, changed: RunConfig) -> dict[str, Any]:
    """Return the values of ``changed`` that differ from those of ``config``, by dotted key."""
    before = flatten(config.to_dict())
    return {key: value for key, value in flatten(changed.to_dict()).items() if before.get(key) != value}
