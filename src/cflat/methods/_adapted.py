"""What methods with adapters share: settings, a frozen ViT with one set of adapters and a cosine head, its training."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import Count, Fraction, Positive, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, Method, Phase, StreamInfo
from cflat.methods._feature_cache import FeatureCache
from cflat.nn import AdapterSet, Backbone, CosineHead, freeze
from cflat.nn.blocks import inside
from cflat.nn.vit import attend, embed, mix, num_read, pool, run_blocks, vit_of


@settings_class
class AdapterConfig:
    """Settings of the adapters."""

    bottleneck: Count = 64
    """Hidden width of each adapter; at least 1."""
    dropout: Fraction = 0.1
    """Probability of dropping a hidden unit of an adapter in training; in [0, 1)."""
    scale: Positive = 0.1
    """Scale of the adapter output; above 0."""

    def make_adapters(self, backbone: Backbone) -> AdapterSet:
        """Return a fresh set, which leaves the features as they are."""
        return AdapterSet(backbone, bottleneck=self.bottleneck, dropout=self.dropout, scale=self.scale)


class AdaptedClassifier(nn.Module):
    """Score images with a ViT, frozen in place, trainable adapters in all its blocks, and a trainable cosine head."""

    def __init__(self, backbone: Backbone, adapters: AdapterSet) -> None:
        super().__init__()
        self.backbone = freeze(backbone)
        self.adapters = adapters
        self.head = CosineHead(backbone.feature_dim)

    def stem(self, images: Tensor) -> dict[str, Tensor]:
        """Return what no adapter changes, (B, N, D): the tokens behind block 0's attention and behind its MLP."""
        # The first adapter acts beside this MLP, so both are the same in all evaluations of a step.
        block = vit_of(self.backbone).blocks[0]

        def enter(tokens: Tensor) -> dict[str, Tensor]:
            attended = attend(block, tokens)
            return {"attended": attended, "mixed": mix(block, attended)}

        return inside(block, enter, embed(self.backbone, images))

    def features(self, images: Tensor, attended: Tensor | None = None, mixed: Tensor | None = None) -> Tensor:
        """Return features (B, D); what `stem` returns may be given if it is known already."""
        if attended is None or mixed is None:
            # In the order in which `stem` puts them.
            attended, mixed = self.stem(images).values()
        adapters, num_outputs = list(self.adapters), num_read(self.backbone)
        tokens = mixed + adapters[0](attended)
        return pool(self.backbone, run_blocks(self.backbone, tokens, 1, adapters=adapters, num_outputs=num_outputs))

    def forward(self, images: Tensor, attended: Tensor | None = None, mixed: Tensor | None = None) -> Tensor:
        """Return logits (B, num_classes)."""
        return self.head(self.features(images, attended, mixed))


class AdaptedMethod(Method):
    """Train adapters and a head among the classes of one task; subclasses classify by the features."""

    network: AdaptedClassifier

    def __init__(self, config: AdapterConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.network = AdaptedClassifier(backbone, config.make_adapters(backbone))
        # Remains 0 in methods that train the first task alone; EASE moves it.
        self.first_class = 0

    def prepare(self, batch: Batch) -> Batch:
        """Add the part of the forward pass that no adapter changes."""
        return batch.with_(**self.network.stem(batch.images))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task."""
        logits = model(batch.images, **batch.extras)
        return Loss({"classify": functional.cross_entropy(logits, batch.labels - self.first_class)})


class FirstTaskAdapted(AdaptedMethod):
    """Train adapters in the first task and never again."""

    def __init__(self, config: AdapterConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.cache = FeatureCache(self.network)

    def grow(self, task: Task) -> None:
        """Give the first task its head."""
        if task.index == 0:
            self.network.head.grow(task.num_classes)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return one phase for the first task, none for later ones."""
        return (Phase(),) if task.index == 0 else ()
