"""Which of the trained parameters are perturbed: all others get the radius 0, and are trained as before."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from torch import nn

from cflat._errors import ConfigError
from cflat.methods import ParamGroup
from cflat.nn.adapters import Adapter
from cflat.nn.components import PromptComponents
from cflat.nn.heads import GrowingModule
from cflat.nn.prompts import PrefixPrompts, PromptPool

Perturbed = Literal["all", "norms", "adapters", "body"]
FirstTask = Literal["same", "plain"]

# _NormBase covers BatchNorm, SyncBatchNorm and InstanceNorm of any dimension.
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_ADAPTERS = (Adapter, PromptPool, PrefixPrompts, PromptComponents)
_ADAPTER_NAME = re.compile(r"adapter|prompt|lora", re.IGNORECASE)
_HEAD_NAMES = {"head", "heads", "fc", "classifier"}


def restrict_radius(groups: list[ParamGroup], network: nn.Module, what: Perturbed) -> list[ParamGroup]:
    """Return the groups with the radius 0 for what is not to be perturbed.

    ``norms``: parameters of normalization layers alone (SAM-ON). ``adapters``: those of adapters, prompts and modules
    that are called so. ``body``: all but the heads.
    """
    if what == "all":
        return groups
    chosen = _chosen(network, what)
    parts = []
    for group in groups:
        parts.append(replace(group, params=[param for param in group.params if param in chosen]))
        parts.append(replace(group, params=[param for param in group.params if param not in chosen], rho=0.0))
    return [part for part in parts if part.params]


def perturbs_any(groups: list[ParamGroup]) -> bool:
    """Whether any parameter has a radius other than 0."""
    return any(group.params and group.rho != 0 for group in groups)


def require_perturbed(groups: list[ParamGroup], network: nn.Module, what: Perturbed) -> None:
    """Reject a choice that leaves nothing to perturb in the first phase of a run."""
    if groups and not perturbs_any(restrict_radius(groups, network, what)):
        raise ConfigError(
            f"optimizer.perturb={what} leaves nothing to perturb: the method trains no such parameters. Choose another "
            "value, or optimizer=none."
        )


def _chosen(network: nn.Module, what: Perturbed) -> set[nn.Parameter]:
    is_wanted = {"norms": _is_norm, "adapters": _is_adapter, "body": _is_head}[what]
    found = {
        param
        for name, module in network.named_modules()
        if is_wanted(name.rpartition(".")[2], module)
        for param in module.parameters()
    }
    return set(network.parameters()) - found if what == "body" else found


def _is_norm(name: str, module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


def _is_adapter(name: str, module: nn.Module) -> bool:
    # By name as well: adapters of timm and of plug-ins are no classes of ours.
    return isinstance(module, _ADAPTERS) or _ADAPTER_NAME.search(name) is not None


def _is_head(name: str, module: nn.Module) -> bool:
    return isinstance(module, GrowingModule) or name in _HEAD_NAMES
