"""Checks across sections: which parts of a configuration go together."""

from __future__ import annotations

from cflat._errors import ConfigError
from cflat._registry import require_known, suggest
from cflat.config.choices import Choice
from cflat.config.sections import BackboneSettings, DataSettings, StreamSettings
from cflat.config.validation import quote
from cflat.data import INPUTS, DatasetSpec, dataset_spec
from cflat.methods import get_method_spec, list_methods
from cflat.nn.backbone import Family, get_backbone_spec, list_backbones
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings, has_weight_decay

ACCELERATORS = ("auto", "cpu", "cuda")
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp")
VECTOR_BACKBONES = ("mlp", "identity")


def check_together(
    *,
    method: Choice,
    stream: StreamSettings,
    data: DataSettings,
    backbone: BackboneSettings,
    base: BaseSettings,
    runtime: RuntimeSettings,
    train: TrainSettings,
) -> None:
    """Reject parts that do not go together."""
    spec = dataset_spec(data.name)
    _check_backbone(method, backbone)
    _check_vectors(backbone, spec)
    _check_stream(method, stream, spec)
    _check_online(method, stream, train, base)
    _check_images(method, data, spec)
    _check_base(base)
    _check_runtime(runtime)
    if runtime.strategy == "fsdp":
        _check_shards(method, backbone)


def backbone_family(name: str) -> Family | None:
    """Return the family of a backbone by its name, or None if it must be built to find out."""
    spec = get_backbone_spec(name)
    return None if spec is None else spec.family


def _check_backbone(method: Choice, backbone: BackboneSettings) -> None:
    if not backbone.name.startswith("timm:"):
        require_known("backbone", backbone.name, list_backbones(), "timm:NAME")
    require_known("kind of inputs", backbone.inputs, INPUTS.names())
    # The family of a timm:NAME is unknown before it is built; `create_method` checks it then.
    families = get_method_spec(method.name).families
    family = backbone_family(backbone.name)
    if family is not None and family not in families:
        raise ConfigError(
            f"method {method.name!r} runs on {' and '.join(families)} backbones, not on {backbone.name!r}; "
            "choose another backbone.name."
        )
    spec = get_backbone_spec(backbone.name)
    if spec is not None and backbone.image_size is not None and backbone.image_size % spec.patch_size:
        raise ConfigError(f"backbone.image_size must be a multiple of {spec.patch_size}, got {backbone.image_size}.")


def _check_vectors(backbone: BackboneSettings, spec: DatasetSpec) -> None:
    sizes = [f"backbone.{key}" for key in ("width", "depth") if getattr(backbone, key) is not None]
    if sizes and backbone.name != "mlp":
        raise ConfigError(f"{' and '.join(sizes)} can be chosen for backbone mlp only; {backbone.name!r} has its own.")
    if not spec.holds_vectors:
        if backbone.inputs == "vectors":
            raise ConfigError(f"backbone.inputs 'vectors' is for features:PATH; {spec.name!r} holds images.")
        if backbone.name == "identity":
            raise ConfigError(f"backbone 'identity' is for features:PATH; {spec.name!r} holds images.")
        return
    if backbone.name not in VECTOR_BACKBONES:
        raise ConfigError(
            f"{spec.name!r} holds vectors, which backbone {backbone.name!r} cannot read; "
            f"set backbone.name to {' or '.join(VECTOR_BACKBONES)}."
        )
    if backbone.inputs != "vectors" or backbone.image_size is not None:
        raise ConfigError(
            f"{spec.name!r} holds vectors, which are neither cropped nor resized; leave backbone.inputs and "
            "backbone.image_size out."
        )


def _check_stream(method: Choice, stream: StreamSettings, spec: DatasetSpec) -> None:
    scenarios = get_method_spec(method.name).scenarios
    if stream.scenario not in scenarios:
        raise ConfigError(
            f"method {method.name!r} runs on {', '.join(scenarios)} streams; set stream.scenario to one of them, "
            f"got {stream.scenario!r}."
        )
    # What lies at a path may have domains; that is known when it is read.
    has_domains = bool(spec.domains) or spec.name in ("npz", "domains", "features")
    if stream.scenario == "domain" and not has_domains:
        raise ConfigError(f"stream.scenario 'domain' needs a dataset with domains; {spec.name!r} has none.")
    # Anything but the defaults was set by the user, and would be ignored silently.
    usual = StreamSettings()
    if stream.scenario != "blurry" and (stream.disjoint, stream.blur) != (usual.disjoint, usual.blur):
        raise ConfigError("stream.disjoint and stream.blur are for blurry streams; set stream.scenario=blurry.")
    if stream.scenario != "domain" and (stream.labels != "shared" or stream.domain_order is not None):
        raise ConfigError("stream.labels and stream.domain_order are for domain streams; set stream.scenario=domain.")
    order = stream.domain_order
    if order is not None and len(set(order)) < max(1, len(order)):  # an empty list is rejected as well
        raise ConfigError(f"stream.domain_order must name domains once each, got {list(order)}.")
    if spec.num_classes is not None and (stream.initial or 0) > spec.num_classes:
        raise ConfigError(
            f"stream.initial must be at most {spec.num_classes}, the classes of {spec.name}, got {stream.initial}."
        )


def _check_online(method: Choice, stream: StreamSettings, train: TrainSettings, base: BaseSettings) -> None:
    if not stream.online and train.anytime_every is None:
        return
    able = [name for name in list_methods() if get_method_spec(name).is_online]
    if method.name not in able:
        key = "stream.online" if stream.online else "train.anytime_every"
        raise ConfigError(
            f"{key} needs a method that sees every batch once and can answer at any time; {method.name!r} passes over "
            f"the images of a task again. Choose among {', '.join(able)}."
        )
    if stream.online and (train.epochs, train.first_epochs) not in ((1, None), (1, 1)):
        raise ConfigError("stream.online sees every batch once; leave train.epochs and train.first_epochs out.")
    if base.ema is not None:
        raise ConfigError(
            "base.ema averages the weights when a task ends, and BatchNorm then needs its images once more: it cannot "
            "answer at any time or see every batch once. Leave base.ema out, or stream.online and train.anytime_every."
        )


def _check_images(method: Choice, data: DataSettings, spec: DatasetSpec) -> None:
    if data.validation == 0 and (data.evaluate == "validation" or data.validation_per_class is not None):
        key = "evaluate=validation" if data.evaluate == "validation" else "validation_per_class"
        raise ConfigError(f"data.{key} needs images that are kept aside; set data.validation, for example to 0.2.")
    # Every class must have an exemplar.
    total = getattr(method.settings, "memory_total", None)
    if total is not None and spec.num_classes is not None and total < spec.num_classes:
        raise ConfigError(
            f"method.memory_total must be at least {spec.num_classes}, one image for each class of {spec.name}, "
            f"got {total}."
        )


def _check_base(base: BaseSettings) -> None:
    # Rprop has none, for example.
    if (base.weight_decay or base.first_weight_decay) and not has_weight_decay(base.name):
        raise ConfigError(
            f"base.name {base.name!r} has no weight decay; set base.weight_decay=0 and base.first_weight_decay=null."
        )
    if base.schedule == "multistep" and not base.milestones:
        raise ConfigError("base.schedule 'multistep' needs base.milestones, for example base.milestones=[10,15].")
    for key in ("milestones", "first_milestones"):
        epochs = list(getattr(base, key) or ())
        if epochs != sorted(set(epochs)):
            raise ConfigError(f"base.{key} must ascend, got {epochs}.")


def _check_runtime(runtime: RuntimeSettings) -> None:
    if runtime.accelerator == "mps":
        raise ConfigError(
            "runtime.accelerator 'mps' cannot be used: Apple GPUs lack float64, which runs need; use cpu."
        )
    for key, known in (("accelerator", ACCELERATORS), ("strategy", STRATEGIES)):
        value = getattr(runtime, key)
        if value not in known:
            near = suggest(value, list(known))
            raise ConfigError(f"runtime.{key} must be one of {', '.join(known)}, got {quote(value)}.{near}")
    if runtime.precision == "16" and runtime.accelerator == "cpu":  # loss scaling is CUDA's
        raise ConfigError("runtime.precision 16 needs a GPU; use 32 or bf16 on a CPU.")


def _check_shards(method: Choice, backbone: BackboneSettings) -> None:
    if not get_method_spec(method.name).is_shardable:
        able = [name for name in list_methods() if get_method_spec(name).is_shardable]
        raise ConfigError(
            f"runtime.strategy 'fsdp' cannot spread the network of method {method.name!r}, which copies or merges it "
            f"between tasks; set runtime.strategy=ddp, or choose among {', '.join(able)}."
        )
    if backbone_family(backbone.name) not in ("vit", None):
        raise ConfigError(
            f"runtime.strategy 'fsdp' spreads the blocks of a ViT, {backbone.name!r} has none; set "
            "runtime.strategy=ddp."
        )
