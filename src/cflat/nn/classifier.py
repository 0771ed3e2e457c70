"""The plainest network: a backbone with a head."""

from __future__ import annotations

from torch import Tensor, nn

from cflat.nn.backbone import Backbone
from cflat.nn.heads import LinearHead


class Classifier(nn.Module):
    """Score images with a growing linear head on a backbone."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = LinearHead(backbone.feature_dim)

    def features(self, images: Tensor) -> Tensor:
        """Return features of shape (B, feature_dim)."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (B, num_classes)."""
        logits: Tensor = self.head(self.features(images))
        return logits
