"""L2P: a pool of prompts for a frozen ViT, chosen by the image itself (Wang et al., 2022).

The loss is the cross-entropy among the classes of the present task minus ``pull`` times the cosine between an image's
query and the keys of its prompts. Public code lets all images of a batch use the prompts that most of them want, at
test time too, where batches sorted by class then reveal the task; the headline here is the instance-wise accuracy.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from cflat._settings import Count, settings_class
from cflat.methods import StreamInfo, register_method
from cflat.methods._prompting import PromptConfig, PromptedViT, PromptMethod
from cflat.nn import Backbone, PromptPool


@settings_class
class L2PConfig(PromptConfig):
    """Settings of L2P."""

    top_k: Count = 5
    """Prompts that each image uses; from 1 to pool_size."""
    training_selection: Literal["batchwise", "instancewise"] = "batchwise"
    """Prompt selection in training: by majority vote of the batch, as in public code, or per image."""


@register_method(
    "l2p",
    config=L2PConfig,
    summary="a pool of prompt tokens for a frozen ViT, selected per image",
    scenarios=("class", "task", "domain"),
    families=("vit",),
    is_pretrained=True,
    is_batchwise=True,
    paper="Learning to Prompt for Continual Learning (2022)",
)
class L2P(PromptMethod):
    """Put the prompts with the nearest keys behind the class token and classify by their mean output."""

    network: PromptedViT[PromptPool]

    def __init__(self, config: L2PConfig, backbone: Backbone, info: StreamInfo) -> None:
        pool = PromptPool(backbone.feature_dim, pool_size=config.pool_size, length=config.length, top_k=config.top_k)
        super().__init__(PromptedViT(backbone, pool), config, info)
        self.config = config

    def training_ids(self, query: Tensor) -> Tensor:
        """Return the ids (B, top_k) that the batch voted for, or each image's own."""
        return self.test_ids(query, batchwise=self.config.training_selection == "batchwise")

    def test_ids(self, query: Tensor, *, batchwise: bool) -> Tensor:
        """Return ids (B, top_k) in ascending order: prompts have no position, hence equal sets are equal ids."""
        return self.network.prompts.select(query, batchwise=batchwise).sort(dim=1).values
