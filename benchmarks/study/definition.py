"""What the study runs and how it is judged. Frozen: a test compares the hash of this file with the one in `frozen`.

A replicate is a class order (or an order of domains), a choice of images and a seed, all from its number; differences
are taken replicate by replicate. Tuning and final runs have different replicates, and no final replicate was run
before the freeze. Training sets have the same size in both: a fifth of the images of each class is held out; trials
are judged by these, final runs by test images.

Sizes: on the streams of block A, SGD with momentum ends at a loss below 0.02 or has stopped falling (wrong labels are
learned slowly), and a plain run takes about a second of one thread, so that 24 replicates of 14 rows can be afforded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layer = Mapping[str, Any]


# -- replicates -------------------------------------------------------------------------------------------------

FIRST_FINAL = 100
"""Tuning has the replicates 0, 1, ...; final runs have those from here on."""
VALIDATION = 0.2
"""Fraction of the training images of each class that is held out, in tuning and in final runs."""


def replicate_layer(number: int, scenario: str) -> dict[str, Any]:
    """Return class order, choice of images and seed of a replicate."""
    order = "task_order_seed" if scenario == "domain" else "order_seed"
    return {"stream": {order: 10_000 + number}, "data": {"subsample_seed": 20_000 + number}, "seed": 30_000 + number}


# -- rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One optimizer."""

    title: str
    optimizer: Layer
    cost: float
    """Evaluations per step, about: for the time left and for SGD at equal compute."""
    base: Layer = field(default_factory=dict)
    radius: float | None = 1.0
    """Factor on a stream's radii for optimizers that measure theirs otherwise; None has no radius."""
    rate: float = 1.0
    """Factor on a stream's rates; QHM averages gradients where SGD adds them up."""
    epochs: float = 1.0
    """Factor on a stream's epochs."""


_QHM = {"name": "qhm", "momentum": 0.9, "nu": 0.7}
_AVERAGE = {**_QHM, "ema": 0.9}

ROWS: dict[str, Row] = {
    "sgd": Row("SGD", {"name": "none"}, 1.0, radius=None),
    "nesterov": Row("SGD, Nesterov", {"name": "none"}, 1.0, base={"nesterov": True}, radius=None),
    "qhm": Row("QHM", {"name": "none"}, 1.0, base=_QHM, radius=None, rate=10.0),
    "qhm_average": Row("QHM + average", {"name": "none"}, 1.0, base=_AVERAGE, radius=None, rate=10.0),
    "sam": Row("SAM", {"name": "sam"}, 2.0),
    "looksam": Row("LookSAM", {"name": "looksam"}, 1.2),
    "msam": Row("MSAM", {"name": "msam"}, 1.0, radius=5.0),
    "c_flat": Row("C-Flat", {"name": "c_flat"}, 4.0),
    "turbo": Row("C-Flat Turbo", {"name": "c_flat_turbo", "reading": "printed"}, 1.4),
    "turbo_calibrated": Row("C-Flat Turbo, calibrated", {"name": "c_flat_turbo", "reading": "calibrated"}, 1.4),
    "forecast": Row("C-Flat Forecast", {"name": "c_flat_forecast"}, 1.4),
    "c_flat_qhm_average": Row("C-Flat on QHM + average", {"name": "c_flat"}, 4.0, base=_AVERAGE, rate=10.0),
    "sgd_x1.4": Row("SGD, 1.4 x epochs", {"name": "none"}, 1.4, radius=None, epochs=1.4),
    "sgd_x2": Row("SGD, 2 x epochs", {"name": "none"}, 2.0, radius=None, epochs=2.0),
    "sgd_x4": Row("SGD, 4 x epochs", {"name": "none"}, 4.0, radius=None, epochs=4.0),
    "plain": Row("plain", {"name": "none"}, 1.0, radius=None),
    "plain_rate_x2": Row("plain, 2 x the paper's rate", {"name": "none"}, 1.0, radius=None, rate=2.0),
    "plain_rate_x4": Row("plain, 4 x the paper's rate", {"name": "none"}, 1.0, radius=None, rate=4.0),
}
CONTROLS = ("sgd", "nesterov", "qhm", "qhm_average", "sam")
EQUAL_COMPUTE = ("sgd_x1.4", "sgd_x2", "sgd_x4")


# -- streams ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """One stream with one method."""

    title: str
    """With its scale: it stands beside every number."""
    layer: Layer
    rates: tuple[float, float] = (0.0, 0.0)
    radii: tuple[float, float] = (0.02, 0.4)
    """Ranges that are searched; the radius is that of optimizers whose radius is a length in weight space."""
    tuned_tasks: int | None = None
    """Trials see the first tasks only; None is all of them."""
    needs: tuple[str, ...] = ()
    """What must be on the machine: names of feature files, images, weights."""
    start: Literal["scratch", "pretrained"] = "pretrained"
    """What the trained network starts from; layers on frozen features of a pretrained network count as pretrained."""
    exhibit: tuple[str, str] | None = None
    """Table and column of the paper that settings come from: those of `cflat reproduce TABLE --scale cpu`."""

    @property
    def scenario(self) -> str:
        scenario: str = self.layer["stream"]["scenario"]
        return scenario


_SMALL = {
    "runtime": {"accelerator": "cpu", "threads": 1},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "constant"},
    "backbone": {"name": "mlp", "width": 128, "depth": 2},
}


def _small(
    data: Layer, method: Layer, scenario: str, *, epochs: int, batch: int = 32, tasks: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the configuration of a small stream; ``tasks`` is how many, and the classes of each."""
    split = {} if tasks is None else {"max_tasks": tasks[0], "initial": tasks[1], "increment": tasks[1]}
    return {
        **_SMALL,
        "data": data,
        "method": method,
        "stream": {"scenario": scenario, **split},
        "train": {"epochs": epochs, "batch_size": batch, "eval_batch_size": 512},
    }


def _replay(per_class: int) -> dict[str, Any]:
    return {"name": "replay", "memory_per_class": per_class}


def _features(name: str, **data: Any) -> dict[str, Any]:
    return {"name": f"features:{name}", **data}


_CIFAR = {"train_per_class": 20, "validation_per_class": 10, "test_per_class": 20}
_TASK_KNOWN = {"name": "finetune", "classes": "new"}
_MLP = "MLP of two layers of 128"

_BLOCK_A: dict[str, Stream] = {
    "digits-few": Stream(
        f"digits, 10 images per class, 5 tasks of 2 classes; {_MLP}; replay, 5 exemplars per class",
        _small({"name": "digits", "train_per_class": 10}, _replay(5), "class", epochs=40, batch=16),
        rates=(0.002, 0.2),
        start="scratch",
    ),
    "digits-noise": Stream(
        f"digits, 20 images per class, 20 % wrong labels, 5 tasks of 2 classes; {_MLP}; replay, 5 exemplars per class",
        _small({"name": "digits", "train_per_class": 20, "label_noise": 0.2}, _replay(5), "class", epochs=80),
        rates=(0.002, 0.2),
        start="scratch",
    ),
    "digits-domain": Stream(
        f"digits turned by quarters, 24 images per class, 4 domains; {_MLP}; replay, 5 exemplars per class",
        _small({"name": "rotated_digits", "train_per_class": 24}, _replay(5), "domain", epochs=25),
        rates=(0.002, 0.2),
        start="scratch",
    ),
    "features-noise": Stream(
        "ViT-Tiny features of CIFAR-100 at 112 px, other 50 classes in each replicate, 20 images per class, 20 % wrong "
        f"labels, 10 tasks of 5 classes; {_MLP}; replay, 5 exemplars per class",
        _small(_features("cifar100", label_noise=0.2, **_CIFAR), _replay(5), "class", epochs=15, tasks=(10, 5)),
        rates=(0.001, 0.1),
        needs=("cifar100.npz",),
    ),
    "features-long": Stream(
        "ViT-Tiny features of CIFAR-100 at 112 px, other 50 classes in each replicate, 20 images per class, 25 tasks "
        f"of 2 classes; {_MLP}; replay, 5 exemplars per class",
        _small(_features("cifar100", **_CIFAR), _replay(5), "class", epochs=10, tasks=(25, 2)),
        rates=(0.001, 0.1),
        needs=("cifar100.npz",),
    ),
    "cub-replay": Stream(
        "ViT-Tiny features of CUB-200 at 224 px, 8 images per class, 10 tasks of 20 classes; "
        f"{_MLP}; replay, 2 exemplars per class",
        _small(_features("cub200", train_per_class=8), _replay(2), "class", epochs=10, tasks=(10, 20)),
        rates=(0.001, 0.1),
        needs=("cub200.npz",),
    ),
    "cub-task": Stream(
        "ViT-Tiny features of CUB-200 at 224 px, 8 images per class, 10 tasks of 20 classes, task known; "
        f"{_MLP}; finetune",
        _small(_features("cub200", train_per_class=8), _TASK_KNOWN, "task", epochs=15, tasks=(10, 20)),
        rates=(0.001, 0.1),
        needs=("cub200.npz",),
    ),
    "pacs-domain": Stream(
        f"ViT-Tiny features of PACS at 224 px, 16 images per class and domain, 4 domains; {_MLP}; finetune",
        _small(_features("pacs", train_per_class=16), {"name": "finetune"}, "domain", epochs=50),
        rates=(0.0005, 0.05),
        needs=("pacs.npz",),
    ),
}

_SCRATCH = {
    "preset": "cpu",
    "runtime": {"accelerator": "cpu", "threads": 1},
    "data": {"name": "cifar100", "train_per_class": 50, "validation_per_class": 10, "test_per_class": 100},
    "stream": {"scenario": "class", "initial": 2, "increment": 2, "max_tasks": 5},
    "backbone": {"name": "resnet8", "weights": "random", "image_size": 16, "inputs": "cifar"},
    "train": {"epochs": 25, "batch_size": 16, "eval_batch_size": 256},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "cosine"},
}
_B_TITLE = (
    "CIFAR-100 at 16 px, other 10 classes in each replicate, 50 images per class, 5 tasks of 2 classes; ResNet-8 from "
    "scratch, 25 epochs with augmentation"
)
_BLOCK_B: dict[str, Stream] = {
    name: Stream(
        f"{_B_TITLE}; {title}, 5 exemplars per class",
        {**_SCRATCH, "method": {"name": name, "memory_per_class": 5}},
        rates=(0.01, 0.64),
        needs=("images",),
        start="scratch",
    )
    for name, title in (("icarl", "iCaRL"), ("memo", "MEMO"))
}

# With all 200 images per class at 112 px and 5 epochs this block would take 60 hours of one thread, at 64 px and 3
# epochs 17; with 50 images per class it is about 6, which can be completed here.
_FIRST_SESSION = {
    "preset": "cpu",
    "runtime": {"accelerator": "cpu", "threads": 1},
    "data": {"name": "cifar100", "train_per_class": 50, "test_per_class": 10, "validation_per_class": 10},
    "stream": {"scenario": "class", "initial": 10, "increment": 10},
    "backbone": {"name": "vit_tiny", "image_size": 64, "inputs": "timm"},
    "train": {"epochs": 5, "batch_size": 16, "eval_batch_size": 64},
    "base": {"name": "sgd", "momentum": 0.9, "schedule": "cosine"},
}
_C_TITLE = "CIFAR-100 at 64 px, other 50 of 200 images per class in each replicate, 10 tasks of 10 classes; ViT-Tiny"
_BLOCK_C: dict[str, Stream] = {
    name: Stream(
        f"{_C_TITLE}; {title}, 5 epochs in the first task",
        {**_FIRST_SESSION, "method": {"name": name}},
        rates=(0.01, 0.64),
        radii=(0.01, 0.4),
        tuned_tasks=3,
        needs=("images", "weights"),
    )
    for name, title in (("ranpac", "RanPAC"), ("aper", "APER"))
}


# Block P is `cflat reproduce TABLE --scale cpu --seeds REPLICATES`: rate, epochs, batch and radius are the paper's (of
# DUCT, its authors'), and nothing is tuned. Laid over it: fewer test images, one thread, an order of the domains.
_FEW_TESTS = {"data": {"test_per_class": 20}, "runtime": {"accelerator": "cpu", "threads": 1}}
_P_TITLE = "CIFAR-100 at 64 px, all 200 images per class, 10 tasks of 10 classes; ViT-Tiny"
_BLOCK_P: dict[str, Stream] = {
    name: Stream(title, {**_FEW_TESTS, "stream": stream}, needs=("images", "weights"), exhibit=exhibit)
    for name, title, stream, exhibit in (
        ("ease", f"{_P_TITLE}; EASE, 5 epochs", {"scenario": "class"}, ("table3", "EASE")),
        (
            "duct",
            "PACS at 64 px, all 40 images per class and domain, 4 domains; ViT-Tiny; DUCT, 15 epochs",
            {"scenario": "domain"},
            ("table9", "DomainNet"),
        ),
        ("l2p", f"{_P_TITLE}; L2P, 5 epochs", {"scenario": "class"}, ("table3", "L2P")),
    )
}
PAPER_LINES = {
    "plain": "plain",
    "sam": "+SAM",
    "looksam": "+LookSAM",
    "c_flat": "+C-Flat",
    "turbo": "+C-Flat Turbo",
    "plain_rate_x2": "plain",
    "plain_rate_x4": "plain",
}
"""Lines of the paper's tables that rows are."""


# -- blocks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Streams that share rows, budgets and the number of replicates."""

    title: str
    streams: Mapping[str, Stream]
    rows: tuple[str, ...]
    trials: int
    """Of every row alike; 0 takes the settings of the paper."""
    tuning_replicates: int
    final_replicates: int
    final_validation: float = VALIDATION
    """Fraction held out in final runs too, so that training sets are as large as in trials."""
    reference: str = "sgd"
    """The row that others are set against; plain is the base optimizer of the paper's table: SGD, of L2P Adam."""

    @property
    def finals(self) -> range:
        return range(FIRST_FINAL, FIRST_FINAL + self.final_replicates)


_A_ROWS = (
    *CONTROLS,
    *("msam", "c_flat", "turbo", "turbo_calibrated", "forecast", "c_flat_qhm_average"),
    *EQUAL_COMPUTE,
)
_C_ROWS = (*CONTROLS, "looksam", "c_flat", "turbo", "turbo_calibrated", "forecast", *EQUAL_COMPUTE)
_P_ROWS = ("plain", "sam", "looksam", "c_flat", "turbo", "plain_rate_x2", "plain_rate_x4")

BLOCKS: dict[str, Block] = {
    "A": Block("small streams, never used before", _BLOCK_A, _A_ROWS, 8, 3, 24),
    "B": Block("from scratch", _BLOCK_B, (*CONTROLS, "c_flat", "turbo", "forecast", *EQUAL_COMPUTE), 4, 2, 16),
    "C": Block("first-session methods", _BLOCK_C, _C_ROWS, 4, 2, 8, final_validation=0.0),
    "P": Block("the paper's own protocol and settings", _BLOCK_P, _P_ROWS, 0, 0, 3, 0.0, "plain"),
}
STREAMS: dict[str, Stream] = {name: stream for block in BLOCKS.values() for name, stream in block.streams.items()}
BLOCK_OF: dict[str, str] = {stream: name for name, block in BLOCKS.items() for stream in block.streams}


# -- tuning: see `tuning` ----------------------------------------------------------------------------------------

EXTRA_TRIALS = 2
"""Beyond the edge of the range if the best trial lies at one, once, for every row alike."""
EXTRA_STEP = 0.2
"""How far each of them goes beyond the edge, as a fraction of the range in the logarithm."""


# -- contrasts and the rule: see `analysis` ----------------------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """A row minus another."""

    row: str
    reference: str
    is_about_flatness: bool = True
    """If so, streams that measure training speed do not decide it."""

    @property
    def title(self) -> str:
        return f"{ROWS[self.row].title} - {ROWS[self.reference].title}"


CONTRASTS: tuple[Contrast, ...] = (
    Contrast("c_flat", "sgd"),
    Contrast("turbo", "sgd"),
    Contrast("turbo", "c_flat"),
    Contrast("turbo_calibrated", "c_flat"),
    Contrast("forecast", "c_flat"),
    Contrast("forecast", "sgd_x1.4"),
    Contrast("qhm_average", "sgd", is_about_flatness=False),
    Contrast("c_flat_qhm_average", "qhm_average"),
)
"""Decided over all streams of the tuned blocks on which both rows are run; Holm over these eight."""
TUNED_BLOCKS = ("A", "B", "C")
PAPER_CONTRASTS: tuple[Contrast, ...] = tuple(
    Contrast(row, reference, is_about_flatness=False)
    for row, reference in (
        ("c_flat", "plain"),
        ("turbo", "plain"),
        ("turbo", "c_flat"),
        ("sam", "plain"),
        ("looksam", "plain"),
        ("plain_rate_x2", "plain"),
        ("plain_rate_x4", "plain"),
        ("turbo", "plain_rate_x4"),
    )
)
"""Decided over the streams of block P; Holm over these eight. Whether the paper's numbers come out with the paper's
settings is asked here, not why: a stream that measures training speed is labelled and counts."""
AT_EQUAL_COMPUTE = {
    "sam": "sgd_x2",
    "looksam": "sgd_x1.4",
    "c_flat": "sgd_x4",
    "turbo": "sgd_x1.4",
    "turbo_calibrated": "sgd_x1.4",
    "forecast": "sgd_x1.4",
    "c_flat_qhm_average": "sgd_x4",
}
"""SGD that costs as much as a row, shown beside it."""

METRIC = "avg"
"""Primary."""
LEVEL = 0.05
MARGIN = 0.5
"""Points of Avg: as good is a lower end above minus this."""
POSITIVE_FRACTION = 2 / 3
"""Of the streams, at least so many must have the sign of a verdict."""
SPEED_LIMITED = 0.6
"""Rank correlation of end loss and Avg over rows, in absolute value, beyond which a stream measures training speed."""
CONVERGED_LOSS = 0.02
STOPPED_FALLING = 0.9
"""SGD has stopped falling if its end loss is at least this times that after three quarters of the epochs."""


# -- the paper's claims ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What the paper says, and which contrasts decide it, on which streams."""

    name: str
    title: str
    wanted: Literal["better", "as good", "faster"]
    contrasts: tuple[Contrast, ...]
    blocks: tuple[str, ...] = TUNED_BLOCKS
    scenarios: tuple[str, ...] = ("class", "task", "domain")
    is_primary: bool = False
    """Its contrasts are among the eight of the study, and are judged with these; others are a family of their own."""


SPEED_FACTOR = 2.0
"""Evaluations of C-Flat over those of Turbo: "1.0 to 1.25 times faster" is 2 to 2.25 times the images per second."""

CLAIMS: tuple[Claim, ...] = (
    Claim("c-flat-gains", "C-Flat is better than plain training", "better", CONTRASTS[:1], is_primary=True),
    Claim("turbo-gains", "C-Flat Turbo is better than plain training", "better", CONTRASTS[1:2], is_primary=True),
    Claim("turbo-as-good", "C-Flat Turbo is as good as C-Flat", "as good", CONTRASTS[2:3], is_primary=True),
    Claim("turbo-speed", "C-Flat Turbo is at least twice as fast as C-Flat", "faster", CONTRASTS[2:3]),
    Claim(
        "paper-protocol",
        "With the paper's methods and settings, C-Flat and C-Flat Turbo are better than plain training",
        "better",
        PAPER_CONTRASTS[:2],
        blocks=("P",),
    ),
    Claim(
        "turbo-sam",
        "With the paper's methods and settings, C-Flat Turbo is better than SAM and LookSAM",
        "better",
        (Contrast("turbo", "sam", is_about_flatness=False), Contrast("turbo", "looksam", is_about_flatness=False)),
        blocks=("P",),
    ),
    Claim(
        "task-and-domain",
        "The gains carry over to task- and domain-incremental learning",
        "better",
        CONTRASTS[:2],
        scenarios=("task", "domain"),
    ),
    Claim("scratch", "Networks trained from scratch gain too", "better", CONTRASTS[:2], blocks=("B",)),
)
