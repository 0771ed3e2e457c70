"""CODA-Prompt: prompts mixed from components by attention, in a frozen ViT (Smith et al., 2023).

Each task trains its own components, its outputs and nothing else; the components of earlier tasks take part but are
frozen. The loss is the cross-entropy among the classes of the present task, plus a penalty that keeps the components
orthogonal. Unlike L2P and DualPrompt nothing is chosen, so that the mixture is trained end to end.
"""

from __future__ import annotations

from torch import Tensor, nn

from cflat._settings import Count, CountOrZero, NotNegative, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, Method, StreamInfo, register_method
from cflat.methods._classifier import classify
from cflat.methods._feature_cache import FeatureCache
from cflat.methods._prompting import FrozenViT
from cflat.nn import Backbone, LinearHead, PromptComponents, vit


@settings_class
class CODAPromptConfig:
    """Settings of CODA-Prompt."""

    components: Count = 10
    """Components that each task adds; at least 1."""
    length: Count = 8
    """Tokens per component, half of them for keys and half for values; even."""
    layers: tuple[CountOrZero, ...] = (0, 1, 2, 3, 4)
    """Blocks that receive prompts."""
    orthogonality: NotNegative = 0.1
    """Weight of the penalty on components that are not orthogonal; the authors' later code has 0."""


@register_method(
    "coda_prompt",
    config=CODAPromptConfig,
    summary="prompts mixed from components by attention, for a frozen ViT",
    families=("vit",),
    is_pretrained=True,
    paper="CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning (2023)",
)
class CODAPrompt(Method):
    """Train the newest components and the head among the classes of the present task."""

    network: ComponentViT

    def __init__(self, config: CODAPromptConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        components = PromptComponents(backbone, length=config.length, layers=config.layers)
        self.network = ComponentViT(backbone, components)
        self.queries = FeatureCache(self.network.backbone)
        self.classes = range(0)

    def grow(self, task: Task) -> None:
        """Freeze the components of before, add new ones and outputs for the new classes."""
        self.classes = task.classes
        self.network.components.grow(self.config.components)
        self.network.head.grow_to(task.classes.stop)

    def prepare(self, batch: Batch) -> Batch:
        """Add tokens and queries, which no trained weight changes."""
        tokens = self.network.tokens(batch.images)
        return batch.with_(tokens=tokens, query=self.network.query(tokens))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task and keep the components orthogonal."""
        logits = model(batch.extras["tokens"], batch.extras["query"])
        parts = {"classify": classify(logits, batch.labels, self.classes)}
        if self.config.orthogonality > 0:
            parts["orthogonality"] = self.config.orthogonality * self.network.components.orthogonality()
        return Loss(parts)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return logits with the mixture of all components."""
        tokens = self.network.tokens(batch.images)
        query = self.queries(batch, lambda: self.network.query(tokens))
        return {"logits": self.network(tokens, query)}


class ComponentViT(FrozenViT):
    """A frozen ViT with prompt components and a linear head."""

    def __init__(self, backbone: Backbone, components: PromptComponents) -> None:
        super().__init__(backbone, components.first_block)
        self.components = components
        # Outputs of different tasks are never trained together: what they start with remains as noise between them.
        self.head = LinearHead(backbone.feature_dim, init="truncated_normal")

    def forward(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Return logits (B, classes) of images, given their tokens and queries."""
        prefixes, wanted = self.components.prefixes(query), vit.num_read(self.backbone)
        outputs = vit.run_blocks(self.backbone, tokens, self.first_block, prefixes=prefixes, num_outputs=wanted)
        return self.head(vit.pool(self.backbone, outputs))
