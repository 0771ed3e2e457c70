"""Network parts: backbones, growing heads, adapters, prompts and network surgery."""

from cflat.nn.adapters import Adapter, AdapterSet, forward_adapters
from cflat.nn.anchor import WeightAnchor
from cflat.nn.backbone import Backbone, create_backbone, list_backbones
from cflat.nn.components import PromptComponents
from cflat.nn.heads import Classifier, CosineHead, LinearHead, NearestMeanHead
from cflat.nn.prompts import PrefixPrompts, PromptPool
from cflat.nn.ridge import RidgeHead
from cflat.nn.surgery import freeze, frozen_copy, merge_weights, split_backbone, train_unfrozen_, unfreeze
from cflat.nn.transport import transport_plan, transport_rows

__all__ = [
    "Adapter", "AdapterSet", "Backbone", "Classifier", "CosineHead", "LinearHead", "NearestMeanHead",
    "PrefixPrompts", "PromptComponents", "PromptPool", "RidgeHead", "WeightAnchor", "create_backbone",
    "forward_adapters", "freeze", "frozen_copy", "list_backbones", "merge_weights", "split_backbone",
    "train_unfrozen_", "transport_plan", "transport_rows", "unfreeze",
]  # fmt: skip
