"""What L2P and DualPrompt share: a frozen ViT that chooses its prompts by its plain features, and both evaluations.
CODA-Prompt shares the frozen ViT.

The plain features of an image (its query) depend on no trained weight. In training they are computed once per step,
together with the prompt ids; at test time once per run.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from cflat._settings import Count, NotNegative, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, Method, StreamInfo
from cflat.methods._classifier import classify
from cflat.methods._feature_cache import FeatureCache
from cflat.nn import Backbone, LinearHead, PrefixPrompts, PromptPool, freeze, vit

Prompts = TypeVar("Prompts", bound=PromptPool | PrefixPrompts)


@settings_class
class PromptConfig:
    """Settings that L2P and DualPrompt share."""

    pool_size: Count = 10
    """Prompts to choose from; at least 1."""
    length: Count = 5
    """Tokens per prompt; at least 1."""
    # As in PILOT; the first PyTorch port of DualPrompt has 1.0.
    pull: NotNegative = 0.1
    """Weight of the term that pulls the chosen keys to the queries; at least 0."""


class FrozenViT(nn.Module):
    """A frozen ViT on which prompts act from ``first_block`` on: up to it, all evaluations give the same tokens."""

    def __init__(self, backbone: Backbone, first_block: int) -> None:
        super().__init__()
        self.backbone = freeze(backbone)
        self.first_block = first_block

    def tokens(self, images: Tensor) -> Tensor:
        """Return what enters the first prompted block, (B, N, D)."""
        return vit.run_blocks(self.backbone, vit.embed(self.backbone, images), stop=self.first_block)

    def query(self, tokens: Tensor) -> Tensor:
        """Return the plain features (B, D) of images, given their tokens."""
        return vit.pool(self.backbone, vit.run_blocks(self.backbone, tokens, self.first_block))


class PromptedViT(FrozenViT, Generic[Prompts]):
    """A frozen ViT with prompts and a linear head."""

    def __init__(self, backbone: Backbone, prompts: Prompts) -> None:
        super().__init__(backbone, prompts.first_block)
        self.prompts: Prompts = prompts
        self.head = LinearHead(backbone.feature_dim, init="truncated_normal")

    def features(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return prompted features (B, D) of images, given their tokens and prompt ids."""
        return self.prompts.features(self.backbone, tokens, ids)

    def forward(self, tokens: Tensor, query: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, classes) and how well the chosen keys agree with the queries."""
        return self.head(self.features(tokens, ids)), self.prompts.agreement(query, ids)


class PromptMethod(Method):
    """Train prompts, keys and head among the classes of the present task; subclasses choose the prompts."""

    scores = ("instancewise", "batchwise")
    network: PromptedViT[Any]

    def __init__(self, network: PromptedViT[Any], config: PromptConfig, info: StreamInfo) -> None:
        super().__init__(info)
        self.network = network
        self.pull = config.pull
        self.classes = range(0)
        self.queries = FeatureCache(network.backbone)

    @abstractmethod
    def training_ids(self, query: Tensor) -> Tensor:
        """Return the prompt ids of training images."""
        raise NotImplementedError

    @abstractmethod
    def test_ids(self, query: Tensor, *, batchwise: bool) -> Tensor:
        """Return the prompt ids of test images, each choosing for itself or all those that most of them want."""
        raise NotImplementedError

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes."""
        self.classes = task.classes
        self.network.head.grow_to(task.classes.stop)

    def prepare(self, batch: Batch) -> Batch:
        """Add tokens and queries, which no trained weight changes, and ids, which a perturbed key must not change."""
        tokens = self.network.tokens(batch.images)
        query = self.network.query(tokens)
        return batch.with_(tokens=tokens, query=query, ids=self.training_ids(query))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task and pull the chosen keys to the queries."""
        logits, agreement = model(*(batch.extras[name] for name in ("tokens", "query", "ids")))
        return Loss({"classify": classify(logits, batch.labels, self.classes), "pull": -self.pull * agreement})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return logits with prompts that each image chose for itself, and with those that the batch voted for."""
        tokens = self.network.tokens(batch.images)
        query = self.queries(batch, lambda: self.network.query(tokens))
        own, voted = (self.test_ids(query, batchwise=batchwise) for batchwise in (False, True))
        batchwise = self.network(tokens, query, voted)[0]
        instancewise = batchwise.clone()
        # Most images get the prompts that they want: only the others need a second pass.
        # ids are (B, top_k) in L2P and (B,) in DualPrompt.
        is_outvoted = (own != voted).view(len(batch), -1).any(dim=1)
        if is_outvoted.any():
            instancewise[is_outvoted] = self.network(tokens[is_outvoted], query[is_outvoted], own[is_outvoted])[0]
        return {"instancewise": instancewise, "batchwise": batchwise}
