"""What the front is measured on: streams that are small and trained to the end, and rows: optimizers and rules.

A stream must be converged (the training loss at the end of a task is a few hundredths, so that a slower optimizer is
not simply further from its minimum), small (a plain run takes seconds: differences of a point need many seeds, not
large networks), and its best learning rate must lie inside the range that is searched. Seconds are CPU seconds of one
plain run on one thread of the machine that the results were made on. Power: if paired differences between two
optimizers have a deviation of 0.5 to 1.5 points over seeds, then 8 seeds give a 95 % interval of +-0.4 to +-1.2 points,
and 3 seeds, where a run takes a minute, one of +-1.2 to +-3.7: enough to see a collapse, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ROWS", "STREAMS", "Bench", "Places", "Row"]

Layer = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Where data and weights lie; None where a stream that needs them is not run."""

    data_root: Path | None = None
    weights: Path | None = None
    features: Path | None = None


@dataclass(frozen=True)
class Bench:
    """One stream with one method."""

    title: str
    layer: Mapping[str, Any]
    rates: tuple[float, float]
    """Learning rates that are searched."""
    radii: tuple[float, float]
    """Radii that are searched, for optimizers whose radius is a length in weight space."""
    seeds: int
    """Of the final runs; 0 is for streams that are only timed."""
    seconds: float
    """CPU seconds of a plain run."""
    needs: tuple[str, ...] = ()
    """Fields of `Places`."""

    def config(self, places: Places) -> Layer:
        """Return the layer with the paths filled in."""
        layer = {key: dict(value) if isinstance(value, Mapping) else value for key, value in self.layer.items()}
        if "features" in self.needs:
            layer["data"]["name"] = f"features:{places.features}"
        if "data_root" in self.needs:
            layer["data"]["root"] = str(places.data_root)
        if "weights" in self.needs:
            layer["backbone"]["weights"] = str(places.weights)
        return layer


_RUN = {"runtime": {"accelerator": "cpu", "threads": 1}}

# Digits, 8 x 8: 1,442 images (1,153 for trials) in five tasks of two classes, batch 16, five epochs: 450 steps, ten
# where the best rates are low. 355 test images: one image is 0.28 points of Last, which is common to all rows and thus
# mostly drops out of paired differences.
_DIGITS = {
    **_RUN,
    "data": {"name": "digits"},
    "train": {"epochs": 5, "batch_size": 16, "eval_batch_size": 256},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "constant"},
}
# ViT-Tiny features of CIFAR-100 at 112 px: ten tasks of ten classes, 40 images per class, batch 16, five epochs: 1,300
# steps; loss at the end 0.01 to 0.05. 20 test images per class, 2,000 in all: +-1 point for a single run, paired less.
_FEATURES = {
    **_RUN,
    "data": {"train_per_class": 40, "test_per_class": 20, "validation_per_class": 10},
    "stream": {"initial": 10, "increment": 10},
    "backbone": {"name": "mlp", "width": 128, "depth": 2},
    "train": {"epochs": 5, "batch_size": 16, "eval_batch_size": 512},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "constant"},
}
# ViT-Tiny with adapters at 112 px: two tasks of ten classes, 16 images per class, eight epochs with cosine: 160 steps.
# A third of the time is testing. The ridge and prototypes need no training. EASE and RanPAC train for 16 epochs: after
# eight the losses were still 0.52 and 0.47 (EASE's is 0.31 after 16, with augmentation), and an optimizer that slows
# training down lost for that alone.
_VIT = {
    **_RUN,
    "preset": "cpu",
    "data": {"name": "cifar100", "train_per_class": 16, "test_per_class": 20, "validation_per_class": 10},
    "stream": {"scenario": "class", "initial": 10, "increment": 10, "max_tasks": 2},
    "backbone": {"name": "vit_tiny", "image_size": 112, "inputs": "timm"},
    "train": {"epochs": 8, "batch_size": 16, "eval_batch_size": 64},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "cosine"},
}
# A ResNet-8 from scratch at 16 px: four tasks of two classes, 80 images per class left for training, padded crops
# and flips, 60 epochs with cosine: 1,300 steps. After 40 epochs the loss of the first task was 0.09 in spite of
# augmentation (that of later tasks contains distillation, which has no floor at 0). A ResNet-32 took 40 s for 620
# steps, after which it had learned nothing.
_SCRATCH = {
    **_RUN,
    "preset": "cpu",
    "data": {"name": "cifar100", "train_per_class": 80, "test_per_class": 50, "validation_per_class": 20},
    "stream": {"scenario": "class", "initial": 2, "increment": 2, "max_tasks": 4},
    "backbone": {"name": "resnet8", "weights": "random", "image_size": 16, "inputs": "cifar"},
    "train": {"epochs": 60, "batch_size": 32, "eval_batch_size": 128},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "cosine"},
}


def _resnet18(backbone: str, stem: str, *, seconds: float) -> Bench:
    return Bench(
        f"CIFAR-100 at 32 px, ResNet-18 with {stem} from scratch, iCaRL, augmentation",
        {
            **_SCRATCH,
            "method": {"name": "icarl", "memory_per_class": 5},
            "backbone": {"name": backbone, "weights": "random", "image_size": 32, "inputs": "cifar"},
        },
        rates=(0.02, 0.4),
        radii=(0.02, 0.4),
        seeds=0,
        seconds=seconds,
        needs=("data_root",),
    )


STREAMS: dict[str, Bench] = {
    "digits-task": Bench(
        "Digits, small CNN, task-incremental finetune",
        {
            **_DIGITS,
            "method": {"name": "finetune", "classes": "new"},
            "stream": {"scenario": "task"},
            "train": {**_DIGITS["train"], "epochs": 10},
        },
        rates=(0.0005, 0.02),
        radii=(0.02, 0.4),
        seeds=32,
        seconds=6.0,
    ),
    "digits-class": Bench(
        "Digits, small CNN, class-incremental replay, 5 exemplars per class",
        {**_DIGITS, "method": {"name": "replay", "memory_per_class": 5}, "stream": {"scenario": "class"}},
        rates=(0.005, 0.1),
        radii=(0.02, 0.4),
        seeds=32,
        seconds=3.0,
    ),
    "features-task": Bench(
        "CIFAR-100 features of ViT-Tiny, MLP, task-incremental finetune",
        {
            **_FEATURES,
            "method": {"name": "finetune", "classes": "new"},
            "stream": {**_FEATURES["stream"], "scenario": "task"},
        },
        rates=(0.0005, 0.02),
        radii=(0.02, 0.4),
        seeds=24,
        seconds=3.0,
        needs=("features",),
    ),
    "features-class": Bench(
        "CIFAR-100 features of ViT-Tiny, MLP, class-incremental replay, 5 exemplars per class",
        {
            **_FEATURES,
            "method": {"name": "replay", "memory_per_class": 5},
            "stream": {**_FEATURES["stream"], "scenario": "class"},
        },
        rates=(0.0005, 0.02),
        radii=(0.02, 0.4),
        seeds=24,
        seconds=4.0,
        needs=("features",),
    ),
    "ease": Bench(
        "CIFAR-100 at 112 px, ViT-Tiny, EASE",
        {**_VIT, "method": {"name": "ease"}, "train": {**_VIT["train"], "epochs": 16}},
        rates=(0.05, 0.8),
        radii=(0.005, 0.4),
        seeds=8,
        seconds=85.0,
        needs=("data_root", "weights"),
    ),
    "ranpac": Bench(
        "CIFAR-100 at 112 px, ViT-Tiny, RanPAC",
        {**_VIT, "method": {"name": "ranpac"}, "train": {**_VIT["train"], "epochs": 16}},
        rates=(0.05, 0.8),
        radii=(0.005, 0.4),
        seeds=8,
        seconds=60.0,
        needs=("data_root", "weights"),
    ),
    "icarl": Bench(
        "CIFAR-100 at 16 px, ResNet-8 from scratch, iCaRL, augmentation",
        {
            **_SCRATCH,
            "method": {"name": "icarl", "memory_per_class": 5},
            "data": {**_SCRATCH["data"], "test_per_class": 100},
        },
        rates=(0.02, 0.4),
        radii=(0.02, 0.4),
        seeds=16,
        seconds=35.0,
        needs=("data_root",),
    ),
    "memo": Bench(
        "CIFAR-100 at 16 px, ResNet-8 from scratch, MEMO, augmentation",
        {**_SCRATCH, "method": {"name": "memo", "memory_per_class": 5}},
        rates=(0.02, 0.4),
        radii=(0.02, 0.4),
        seeds=5,
        seconds=35.0,
        needs=("data_root",),
    ),
    # Timed only. A pass through the ImageNet stem is eight times cheaper at 32 px, so that the cost of moving shows.
    "icarl-resnet18": _resnet18("resnet18_cifar", "CIFAR stem", seconds=3000.0),
    "icarl-resnet18-pooled": _resnet18("resnet18", "ImageNet stem", seconds=400.0),
    # Where flatness is known to help elsewhere: few images, wrong labels, long streams; and domains.
    "digits-few": Bench(
        "Digits, 20 images per class, small CNN, class-incremental replay, 5 exemplars per class",
        {
            **_DIGITS,
            "data": {"name": "digits", "train_per_class": 20},
            "method": {"name": "replay", "memory_per_class": 5},
            "stream": {"scenario": "class"},
            "train": {**_DIGITS["train"], "epochs": 20},
        },
        rates=(0.005, 0.1),
        radii=(0.02, 0.4),
        seeds=16,
        seconds=3.0,
    ),
    "digits-noise": Bench(
        "Digits, 20 % wrong labels, small CNN, class-incremental replay, 5 exemplars per class",
        {
            **_DIGITS,
            "data": {"name": "digits", "label_noise": 0.2},
            "method": {"name": "replay", "memory_per_class": 5},
            "stream": {"scenario": "class"},
        },
        rates=(0.005, 0.1),
        radii=(0.02, 0.4),
        seeds=16,
        seconds=3.0,
    ),
    "digits-domain": Bench(
        "Rotated digits, small CNN, domain-incremental finetune",
        {
            **_DIGITS,
            "data": {"name": "rotated_digits"},
            "method": {"name": "finetune"},
            "stream": {"scenario": "domain"},
            "train": {**_DIGITS["train"], "epochs": 10},
        },
        rates=(0.002, 0.08),
        radii=(0.02, 0.4),
        seeds=16,
        seconds=4.0,
    ),
    "features-noise": Bench(
        "CIFAR-100 features of ViT-Tiny, 20 % wrong labels, MLP, class-incremental replay, 5 exemplars per class",
        {
            **_FEATURES,
            "data": {**_FEATURES["data"], "label_noise": 0.2},
            "method": {"name": "replay", "memory_per_class": 5},
            "stream": {**_FEATURES["stream"], "scenario": "class"},
        },
        rates=(0.0005, 0.02),
        radii=(0.02, 0.4),
        seeds=12,
        seconds=4.0,
        needs=("features",),
    ),
    "features-long": Bench(
        "CIFAR-100 features of ViT-Tiny, MLP, 50 tasks of 2 classes, class-incremental replay, 5 exemplars per class",
        {
            **_FEATURES,
            "method": {"name": "replay", "memory_per_class": 5},
            "stream": {"initial": 2, "increment": 2, "scenario": "class"},
        },
        rates=(0.0005, 0.02),
        radii=(0.02, 0.4),
        seeds=12,
        seconds=12.0,
        needs=("features",),
    ),
    "pacs": Bench(
        "PACS at 112 px, ViT-Tiny, RanPAC, domain-incremental",
        {
            **_VIT,
            "method": {"name": "ranpac"},
            "data": {"name": "pacs", "train_per_class": 32, "test_per_class": 20, "validation_per_class": 8},
            "stream": {"scenario": "domain"},
        },
        rates=(0.05, 0.8),
        radii=(0.02, 0.4),
        seeds=3,
        seconds=40.0,
        needs=("data_root", "weights"),
    ),
}


@dataclass(frozen=True)
class Row:
    """One optimizer, or one rule of Turbo."""

    title: str
    optimizer: Mapping[str, Any]
    evaluations: float
    """Per step, about: for the time left."""
    radius: float | None = 1.0
    """Factor on a stream's radii for optimizers that measure theirs otherwise; None has no radius."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the base optimizer beside its rate."""
    rate: float = 1.0
    """Factor on a stream's learning rates: with less momentum, steps are shorter at the same rate."""


def _turbo(title: str, cost: float, /, **settings: Any) -> Row:
    return Row(title, {"name": "c_flat_turbo", **settings}, cost)


_FIRST_VERSION = {"surrogate": "measured", "keep": 0.8, "full_every": 10, "is_guarded": True, "evaluations": 1.3}
"""Turbo's first default: no look-ahead, in proportion to |g|, nothing made up, no bound."""

ROWS: dict[str, Row] = {
    "none": Row("SGD", {"name": "none"}, 1.0, radius=None),
    "c_flat": Row("C-Flat", {"name": "c_flat"}, 4.0),
    "turbo": _turbo("C-Flat Turbo", 1.4),
    "turbo-still": _turbo("C-Flat Turbo, first version", 1.3, rules=_FIRST_VERSION),
    "ahead": Row("C-Flat Turbo, rho=1e-6: looks ahead only", {"name": "c_flat_turbo", "rho": 1e-6}, 1.3, radius=None),
    "turbo-steady": _turbo("C-Flat Turbo, steady", 1.3, rules="steady"),
    "turbo-paper": _turbo("C-Flat Turbo, paper", 1.3, rules="paper"),
    "none-cosine": Row("SGD, cosine in each task", {"name": "none"}, 1.0, radius=None, base={"schedule": "cosine"}),
    "none-nesterov": Row("SGD, Nesterov", {"name": "none"}, 1.0, radius=None, base={"nesterov": True}),
    "none-momentum-0.5": Row(
        "SGD, momentum 0.5, rates x5", {"name": "none"}, 1.0, radius=None, base={"momentum": 0.5}, rate=5.0
    ),
    "none-momentum-0": Row(
        "SGD, no momentum, rates x10", {"name": "none"}, 1.0, radius=None, base={"momentum": 0.0}, rate=10.0
    ),
    "sam": Row("SAM", {"name": "sam"}, 2.0),
    "msam": Row("MSAM", {"name": "msam"}, 1.0, radius=5.0),
    "looksam": Row("LookSAM", {"name": "looksam"}, 1.2),
    "asam": Row("ASAM", {"name": "asam"}, 2.0, radius=10.0),
    "gsam": Row("GSAM", {"name": "gsam"}, 2.0),
    "gam": Row("GAM", {"name": "gam"}, 4.0, radius=4.0),
    "ss_sam": Row("SS-SAM", {"name": "ss_sam"}, 1.5),
    "ae_sam": Row("AE-SAM", {"name": "ae_sam"}, 1.5),
    "friendly_sam": Row("Friendly-SAM", {"name": "friendly_sam"}, 2.0),
    "c_flat_plus": Row("C-Flat++", {"name": "c_flat_plus"}, 2.5),
    "turbo-measured": _turbo("C-Flat Turbo, measured", 1.4, rules="measured"),
    "turbo-1.15": _turbo("C-Flat Turbo, 1.15 evaluations", 1.15, evaluations=1.15),
    "turbo-1.3": _turbo("C-Flat Turbo, 1.3 evaluations", 1.3, evaluations=1.3),
    "turbo-1.5": _turbo("C-Flat Turbo, 1.5 evaluations", 1.5, evaluations=1.5),
    "turbo-paper-reuse": _turbo("C-Flat Turbo, paper, reuse only", 2.3, rules="paper", trigger=False, schedule=False),
    "turbo-steady-reuse": _turbo(
        "C-Flat Turbo, steady, reuse only", 2.3, rules="steady", trigger=False, schedule=False
    ),
}
