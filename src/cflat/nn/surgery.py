"""Take networks apart and put them together: freezing, splitting (MEMO), merging weights (DUCT)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from cflat._lazy import LazyModule
from cflat.nn.backbone import Backbone
from cflat.nn.small import ResNet32, SmallCNN

models = LazyModule("timm.models")

Module = TypeVar("Module", bound=nn.Module)
Weights = Mapping[str, Tensor]


def freeze(module: Module) -> Module:
    """Stop gradients of all parameters, switch to evaluation mode, and return the module."""
    module.requires_grad_(False).eval()
    return module


def unfreeze(module: Module) -> Module:
    """Let all parameters have gradients again, switch to training mode, and return the module."""
    module.requires_grad_(True).train()
    return module


def frozen_copy(module: Module) -> Module:
    """Return a frozen deep copy: a teacher, or a reference to return to."""
    return freeze(copy.deepcopy(module))


def has_batchnorm(module: nn.Module) -> bool:
    """Whether a part takes statistics over a batch, which a single image does not have."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def train_unfrozen_(module: nn.Module) -> None:
    """Switch to training mode all but the parts whose parameters are all frozen.

    A plain ``module.train()`` would let the BatchNorm statistics of frozen parts move and their dropout act.
    """
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    # Not train(), which would switch frozen children as well.
    module.training = True
    for child in module.children():
        train_unfrozen_(child)


def split_backbone(backbone: Backbone) -> tuple[nn.Module, nn.Module]:
    """Split into a generalised part (all but the last stage) and a specialised part (last stage and pool).

    ``specialised(generalised(images))`` equals ``backbone(images)``. The last stage is the last block and
    final norm of a ViT, ``layer4`` of a timm ResNet and ``layer3`` of ResNet-32 and the small CNN. Both parts
    are copies: the backbone is left whole and shares nothing with them.
    """
    model: Any = copy.deepcopy(backbone.model)  # what is cut out below must not be missing in the backbone
    if isinstance(model, models.VisionTransformer) and model.attn_pool is None:
        pool = _TokenPool(model.global_pool, model.num_prefix_tokens)
        # In the order of timm's forward_features and forward_head.
        specialised = nn.Sequential(model.blocks[-1], model.norm, pool, model.fc_norm)
        model.blocks, model.norm, model.fc_norm = model.blocks[:-1], nn.Identity(), nn.Identity()
    elif isinstance(model, models.ResNet | ResNet32 | SmallCNN):
        last = "layer4" if isinstance(model, models.ResNet) else "layer3"
        specialised = nn.Sequential(getattr(model, last), model.global_pool)
        setattr(model, last, nn.Identity())
    else:
        raise ValueError(
            f"{backbone.name} cannot be split; choose a ViT (without attention pooling), a ResNet or small_cnn."
        )
    return _Trunk(model), specialised


class _Trunk(nn.Module):
    """A timm model up to, and without, its pooling."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)  # type: ignore[operator]


class _TokenPool(nn.Module):
    def __init__(self, pool_type: str, num_prefix_tokens: int) -> None:
        super().__init__()
        self.pool_type = pool_type
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        return models.vision_transformer.global_pool_nlc(
            tokens, pool_type=self.pool_type, num_prefix_tokens=self.num_prefix_tokens
        )


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters by name, without gradients."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def merge_weights(
    base: Weights, deltas: Sequence[Weights], scales: Sequence[float], *, alpha: float
) -> dict[str, Tensor]:
    """Return ``base + sum_i alpha * scales[i] * deltas[i]``, by name (DUCT's representation merging).

    The sum is not an average: the total weight grows with the number of deltas.
    """
    if len(deltas) != len(scales):
        raise ValueError(f"Each delta needs one scale; got {len(deltas)} deltas and {len(scales)} scales.")
    merged = {name: values.clone() for name, values in base.items()}
    for delta, scale in zip(deltas, scales, strict=True):
        for name, values in merged.items():
            values.add_(delta[name], alpha=alpha * scale)
    return merged
