"""Presets: complete settings for a method on a dataset, as tables.

``paper`` is what the paper ran: the table of its appendix on CIFAR-100, the PILOT toolbox in everything else, also in
what PILOT's methods do otherwise than ours by default. ``pilot`` is the toolbox's settings everywhere. ``cpu`` is made
for minutes on two cores with a pretrained ViT-Tiny at 112 pixels (or a small CNN on digits), ``smoke`` for seconds with
a random network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cflat._errors import ConfigError
from cflat._registry import require_known
from cflat._settings import read_flag
from cflat.config.checks import backbone_family
from cflat.config.documents import Layer, merge
from cflat.config.hyperparameters import CPU, DIGITS, PAPER, PILOT, RHO, SCRATCH, USUAL_RHO, VECTORS, Hyperparameters
from cflat.config.run_config import RunConfig, parse_config
from cflat.config.validation import quote, require_mapping
from cflat.data import DatasetSpec, dataset_spec
from cflat.methods import MethodSpec, get_method_spec
from cflat.nn.backbone import Family
from cflat.optim import get_optimizer_spec, optimizer_settings

PRESETS: dict[str, str] = {
    "paper": "the paper's hyperparameters: ViT-B/16, 224 px; needs weights and a GPU",
    "pilot": "the hyperparameters of the PILOT toolbox; needs weights and a GPU",
    "cpu": "minutes on two cores: ViT-Tiny at 112 px on a few images per class, or a small CNN on digits",
    "smoke": "seconds: a tiny random network, one epoch, a handful of images; checks that everything runs",
}

SMOKE_IMAGES, SMOKE_STEPS = 8, 6
"""Training images of a class in a smoke run, and the least steps of a usual task: directions are cached and reused."""
ONLINE_EVERY = {True: 100, False: 1000}
"""Images between evaluations of an online stream, by whether the data is light."""
BUDGETS = ("memory_total", "memory_per_class")
"""Two ways of stating an exemplar memory; they exclude each other."""


def default_preset(data: str) -> str:
    """Return the preset of a run that names none: the paper's, except for the embedded digits and for vectors."""
    return "cpu" if dataset_spec(data).is_light else "paper"


def resolve_config(user: Mapping[str, Any]) -> RunConfig:
    """Complete what a user has chosen by a preset, and check the whole.

    Args:
        user: Values by section, from files and command line; at least a method and a dataset.
    """
    chosen = merge({"optimizer": {"name": "none"}}, require_mapping(user, "The configuration"))
    method = get_method_spec(_name(chosen, "method"))
    data = dataset_spec(_name(chosen, "data"))
    preset = chosen.get("preset", default_preset(_name(chosen, "data")))
    require_known("preset", preset, PRESETS)
    optimizer, backbone = (require_mapping(chosen.get(key) or {}, key) for key in ("optimizer", "backbone"))
    defaults = preset_layer(preset, method, data, backbone.get("name"))
    defaults["optimizer"] = _optimizer(optimizer, method.name)
    if read_flag(require_mapping(chosen.get("stream") or {}, "stream").get("online")) is True:
        every = ONLINE_EVERY[data.is_light]
        defaults = merge(defaults, {"train": {"epochs": 1, "first_epochs": None, "anytime_every": every}})
    # A preset may state the memory in the other way.
    if any(key in chosen["method"] for key in BUDGETS):
        for key in BUDGETS:  # the user's takes the place of the preset's
            defaults["method"].pop(key, None)
    config = parse_config(merge(defaults, {"preset": preset}, chosen))
    _require_weights(config, backbone)
    return config


def preset_layer(preset: str, method: MethodSpec, data: DatasetSpec, backbone: Any = None) -> Layer:
    """Return the values of a preset for a method on a dataset, and for the backbone if the user chose another."""
    if data.is_light and preset in ("paper", "pilot"):
        raise ConfigError(f"preset {preset!r} is made for photographs; use cpu or smoke for {data.name}.")
    family = backbone_family(backbone) if isinstance(backbone, str) else None
    # These families are trained from scratch, for longer.
    is_scratch = preset in ("paper", "pilot") and family in ("resnet", "other")
    scratch = SCRATCH.get(method.name, SCRATCH["*"])
    chosen = scratch if is_scratch else _hyperparameters(preset, method.name, data)
    settings = {**_method_settings(preset, method, data, chosen), "name": method.name}
    return merge(
        chosen.layer(),
        {"method": settings, "backbone": _backbone(preset, method, data, backbone, family)},
        {"stream": _stream(method, data)},
        _small(preset, method, data),
    )


def _hyperparameters(preset: str, method: str, data: DatasetSpec) -> Hyperparameters:
    if preset in ("paper", "pilot"):
        rows = PILOT.get(method, PILOT["*"])
        own = PAPER.get(method, {}) if preset == "paper" else {}
        return own.get(data.name) or rows.get(data.name, rows["*"])
    if data.holds_vectors:
        return VECTORS
    table = DIGITS if data.is_embedded or preset == "smoke" else CPU
    return table.get(method, table["*"])


def _method_settings(preset: str, method: MethodSpec, data: DatasetSpec, chosen: Hyperparameters) -> Layer:
    """Return the method's settings of a row, with a budget of exemplars if it keeps some and the row has none."""
    settings = {key: value for key, value in chosen.method.items() if method.needs_memory or key not in BUDGETS}
    if not method.needs_memory or any(key in settings for key in BUDGETS):
        return settings
    # With domains, at least one exemplar of each.
    few = {"smoke": max(2, len(data.domains)), "cpu": 20 if data.is_embedded else 5}
    return {**settings, "memory_per_class": few.get(preset, 20)}


def _backbone(preset: str, method: MethodSpec, data: DatasetSpec, wanted: Any, family: Family | None) -> Layer:
    """Return the preset's backbone and inputs; ``wanted`` is the backbone that the user names, if any."""
    if data.holds_vectors:
        return {"name": "identity" if method.is_pretrained else "mlp", "inputs": "vectors"}
    if data.is_embedded:
        own = "small_cnn" if "other" in method.families else "vit_smoke"
        size = {} if wanted not in (None, "small_cnn", "vit_smoke") else {"image_size": 8}
        return {"name": own, "inputs": "none", **size}
    if family in ("resnet", "other"):
        size = {"image_size": 32} if family == "resnet" and data.name in ("cifar10", "cifar100") else {}
        return {"inputs": "cifar", **size}
    if preset == "smoke":
        return {"name": "vit_smoke", "inputs": "none", "image_size": 16}
    if preset == "cpu":
        return {"name": "vit_tiny", "inputs": "timm", "image_size": 112}
    return {"name": "vit_base", "inputs": preset, "image_size": 224}


def _small(preset: str, method: MethodSpec, data: DatasetSpec) -> Layer:
    """Return what saves time on a small machine: few images, large test batches unless a method looks at the whole one.

    A smoke run has small training batches: its few images then make enough steps to cache and reuse directions.
    """
    if preset not in ("cpu", "smoke"):
        return {}
    test = {} if method.is_batchwise else {"eval_batch_size": 128}
    if preset == "cpu":
        return {"train": test, "data": {} if data.is_light else {"train_per_class": 20, "test_per_class": 10}}
    images = SMOKE_IMAGES * (4 if data.split is None else data.split[1])
    train = {"epochs": 1, "first_epochs": None, "batch_size": min(16, max(2, images // SMOKE_STEPS))}
    return {"train": {**test, **train}, "data": {"train_per_class": SMOKE_IMAGES, "test_per_class": 4}}


def _stream(method: MethodSpec, data: DatasetSpec) -> Layer:
    if (data.domains or data.name == "domains") and "domain" in method.scenarios:
        return {"scenario": "domain"}
    initial, increment = data.split or (None, None)
    return {"scenario": "class", "initial": initial, "increment": increment}


def _optimizer(section: Mapping[str, Any], method: str) -> Layer:
    """Return the radius by method; whatever else an optimizer takes is the same with every preset."""
    try:
        spec = get_optimizer_spec(section.get("name"))  # type: ignore[arg-type]
    except ValueError:
        return {}  # parse_config rejects it
    if "rho" not in optimizer_settings(spec.name) or spec.has_own_radius:
        return {}
    return {"name": spec.name, "rho": RHO.get(method, USUAL_RHO)}


def _require_weights(config: RunConfig, backbone: Mapping[str, Any]) -> None:
    is_vit = backbone_family(config.backbone.name) == "vit" and config.backbone.name != "vit_smoke"
    # Nothing is downloaded unasked, and random weights by accident would waste a run.
    if is_vit and "weights" not in backbone:
        raise ConfigError(
            f"backbone.weights must be given: preset {config.preset!r} starts {config.backbone.name} from pretrained "
            "weights. Use --weights FILE, --weights timm to download them, or --weights random if you mean it."
        )


def radius_of(config: RunConfig) -> float:
    """Return the radius at which C-Flat belongs beside this run: its own, or the method's usual one."""
    own = config.optimizer.keywords().get("rho")
    usual = RHO.get(config.method.name, USUAL_RHO)
    return usual if own is None or get_optimizer_spec(config.optimizer.name).has_own_radius else float(own)


def _name(chosen: Mapping[str, Any], section: str) -> str:
    value = chosen.get(section)
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        example = {"method": "icarl", "data": "digits"}[section]
        raise ConfigError(f"{section}.name must be given, for example --{section} {example}; got {quote(name)}.")
    return name
