"""The small networks that timm does not have: CIFAR ResNets, a three-stage CNN, and networks for vectors.

The convolutional ones follow timm's conventions (`forward_features`, `global_pool`, stages `layer1` ... `layer3`), so
that the rest of the package treats them like a timm ResNet.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from cflat._ranges import Count, checked


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut that subsamples and pads channels with zeros (no parameters)."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.stride = stride
        self.num_padded = num_outputs - num_inputs

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.bn1(self.conv1(inputs)))
        hidden = self.bn2(self.conv2(hidden))
        shortcut = inputs[:, :, :: self.stride, :: self.stride]
        if self.num_padded:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.num_padded))
        return functional.relu(hidden + shortcut)


def _stage(num_inputs: int, num_outputs: int, num_blocks: int, stride: int) -> nn.Sequential:
    blocks = [_BasicBlock(num_inputs, num_outputs, stride)]
    blocks += [_BasicBlock(num_outputs, num_outputs, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


class _ThreeStages(nn.Module):
    """What these networks share: stem, three stages, average over positions."""

    num_features = 64

    def __init__(self, stem: nn.Module, layer1: nn.Module, layer2: nn.Module, layer3: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer1, self.layer2, self.layer3 = stem, layer1, layer2, layer3
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # as in He et al.; torch's default is for a leaky ReLU
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the feature maps before the average over positions."""
        return self.layer3(self.layer2(self.layer1(self.stem(images))))

    def forward(self, images: Tensor) -> Tensor:
        return self.global_pool(self.forward_features(images))


class ResNet32(_ThreeStages):
    """The CIFAR ResNet-32 of He et al. (2016): 3 stages of 5 blocks, 16-32-64 planes, 64 features."""

    num_blocks = 5
    """In each stage."""

    def __init__(self, num_channels: int = 3) -> None:
        super().__init__(
            _convolution(num_channels, 16),
            _stage(16, 16, self.num_blocks, stride=1),
            _stage(16, 32, self.num_blocks, stride=2),
            _stage(32, 64, self.num_blocks, stride=2),
        )


class ResNet8(ResNet32):
    """The smallest of the same family, one block in each stage: trained to the end in a minute on a CPU."""

    num_blocks = 1


class SmallCNN(_ThreeStages):
    """Four convolutions with BatchNorm, 64 features: enough for 8x8 digits and quick on a laptop CPU."""

    def __init__(self, num_channels: int = 3) -> None:
        super().__init__(
            _convolution(num_channels, 16), _convolution(16, 32), _convolution(32, 64, stride=2), _convolution(64, 64)
        )


def _convolution(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU()
    )


class MLP(nn.Module):
    """Hidden layers of equal width with ReLU; the last of them is the feature. Inputs are flattened.

    No normalization layer: a perturbation of the weights is all that changes the outputs.
    """

    @checked
    def __init__(self, num_inputs: int, width: Count = 256, depth: Count = 2) -> None:
        super().__init__()
        self.num_features = width
        sizes = [num_inputs, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of shape (B, width)."""
        hidden = inputs.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden


class Identity(nn.Module):
    """Hand vectors on as they are: the features were computed before, and only a head or class means are learned."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.num_features = num_inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the vectors, (B, D)."""
        return inputs.flatten(1)
