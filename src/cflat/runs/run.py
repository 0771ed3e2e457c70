"""`run`: from a configuration to a result in a run directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cflat._errors import ConfigError, DataError
from cflat._files import reject_links, write_atomic, write_json
from cflat._plugins import loaded_plugins
from cflat.config.run_config import CLASSES, IMAGES, RunConfig
from cflat.config.sections import BackboneSettings, DataSettings
from cflat.data import Dataset, Outline, Split, Stream, build_stream, load_dataset, vector_size, with_label_noise
from cflat.data.check import require_readable
from cflat.data.inputs import eval_transform, train_transform
from cflat.methods import Method, StreamInfo, create_method
from cflat.nn.backbone import Backbone, create_backbone
from cflat.runs.environment import describe_environment
from cflat.runs.failures import report_lost_ranks, translate_errors
from cflat.runs.flatness_observer import FlatnessObserver
from cflat.runs.folder import MetricsLog, RunFolder, RunSummary, has_content, require_writable
from cflat.runs.lock import owned, reject_if_owned
from cflat.runs.memory_limit import MemoryLimit, require_batch
from cflat.train import Inputs, Observer, OptimizerChoice, Runtime, RuntimeSettings, Trainer
from cflat.train.checkpoint import CheckpointStore, require_same
from cflat.train.observer import Observers
from cflat.train.runtime import Part, choose_accelerator, count_devices, seed_everything

logger = logging.getLogger(__name__)

SPARE_BYTES = 16 << 20
CHECKPOINT_COPIES = 6
"""Three files at a time (two kept, one being written), each with at least weights and momentum."""
NORMAL_FRACTION = 0.01
"""Discarded steps that are not worth a warning: loss scaling tries large factors now and then."""
FORMAT = 2
"""Version of the layout of run directories."""


@dataclass(frozen=True)
class Assembly:
    """The parts of a run, made from its configuration."""

    stream: Stream
    method: Method
    inputs: Inputs


def run(
    config: RunConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    num_tasks: int | None = None,
    observers: Sequence[Observer] = (),
    should_stop: Callable[[], bool] = lambda: False,
    patience: float = 0.0,
) -> RunSummary:
    """Train one configuration and return the result, which is also in ``out``.

    Args:
        config: What to do; on resume it may differ from the run's own in fields that are marked neutral.
        out: The run directory, absent or empty; None keeps nothing on disk.
        resume: Continue the run in ``out``; a finished one is only read.
        num_tasks: Stop after this number of tasks; a later ``resume`` continues, and its end writes the summary.
        observers: Notified of steps, epochs and tasks, besides the files.
        should_stop: Asked after every step and between the batches of all other passes; True saves the state and
            raises `TrainingInterrupted`.
        patience: Seconds to wait for another process that works in ``out``.

    Raises:
        ConfigError: If the configuration does not fit the machine or the data.
        DataError: If data, weights or the run directory are not usable; `FolderInUse` if another process uses it.
        StateNotSaved: If it was asked to stop and could not save.
    """
    folder = None if out is None else RunFolder(Path(out))
    if folder is not None and resume and folder.is_finished:
        return _read_result(folder, config)
    check_devices(config.runtime)
    with report_lost_ranks(config), ExitStack() as stack:
        runtime, log = Runtime(config.runtime), None
        folder = runtime.share(folder)  # ranks that looked for a free one may have found another
        own_folder = folder if runtime.is_main else None
        with runtime.together():  # an error of one rank ends all of them
            if own_folder is not None:
                check_folder(own_folder, resume)
                stack.enter_context(owned(own_folder.path, patience))
        # All ranks must agree, or some would wait for the others.
        if folder is not None and resume and runtime.share(folder.is_finished):  # by another process, since we looked
            return _read_result(folder, config)
        with runtime.together():
            if own_folder is not None:
                prepare_folder(own_folder, config, resume)
                log = stack.enter_context(closing(MetricsLog(own_folder.metrics_file)))
            parts = assemble(config)
            # A checkpoint is rejected where any of these differ.
            decisive = {**config.identity(), CLASSES: Outline.of(parts.stream).fingerprint()}
            if own_folder is not None:
                decisive[IMAGES] = _describe(own_folder, config, parts, resume)
        flatness = FlatnessObserver() if can_measure_flatness(config) else None
        own = [observer for observer in (log, flatness) if observer is not None]
        observer = Observers([*own, *(observers if runtime.is_main else ())])
        path = None if folder is None else folder.path
        with translate_errors(config, parts.method, path):
            others = {"observer": observer, "folder": path, "should_stop": should_stop, "identity": decisive}
            result = make_trainer(config, parts, runtime, **others).run(resume=resume, num_tasks=num_tasks)
        cost = result.cost
        if cost.nonfinite_steps > NORMAL_FRACTION * cost.steps:
            text = "%d of %d steps met Inf or NaN and were discarded: the training diverges. Lower base.lr, now %g."
            logger.warning(text, cost.nonfinite_steps, cost.steps, config.base.lr)
        summary = RunSummary(
            config,
            result.accuracy,
            cost,
            seconds=0.0 if log is None else log.seconds,
            num_classes=parts.stream.num_classes,
            validation=result.validation,
            flatness={} if flatness is None else flatness.values(),
        )
        is_done = num_tasks is None or num_tasks >= parts.stream.num_tasks
        if own_folder is not None and is_done:
            write_json(own_folder.summary_file, summary.to_dict())
        return summary


def make_trainer(config: RunConfig, parts: Assembly, runtime: Runtime, **others: Any) -> Trainer:
    """Return the trainer of a configuration; ``others`` are arguments that no configuration decides."""
    return Trainer(
        parts.method,
        parts.stream,
        base=config.base,
        train=config.train,
        runtime=runtime,
        optimizer=OptimizerChoice(config.optimizer.name, config.optimizer.keywords(), **config.optimizer.of_trainer()),
        inputs=parts.inputs,
        seed=config.seed,
        splits=evaluated_splits(config),
        **others,
    )


def assemble(config: RunConfig) -> Assembly:
    """Load the data and build the network; a pure function of the configuration."""
    stream = make_stream(config)
    info = StreamInfo(config.stream.scenario, stream.num_classes, stream.num_tasks, stream.label_modulus)
    # The initial weights must depend neither on the data nor on what ran before.
    seed_everything(config.seed, Part.BUILD)
    try:
        with MemoryLimit(f"backbone.image_size or the sizes among the settings of {config.method.name}"):
            backbone = make_backbone(config.backbone, vector_size(stream.tasks[0].train))
            require_batch(backbone, config.train, config.runtime, stream)
            method = create_method(config.method.name, backbone, info, config.method.settings)
        kind = (config.backbone.inputs, backbone.image_size, backbone.mean, backbone.std)
        inputs = Inputs(train_transform(*kind), eval_transform(*kind))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Assembly(stream, method, inputs)


def open_dataset(data: DataSettings) -> Dataset:
    """Load the images that the settings choose."""
    same = ("train_per_class", "test_per_class", "validation", "validation_per_class", "short_side")
    others = {"seed": data.subsample_seed, "cache_bytes": data.cache_mib << 20, "num_workers": data.workers}
    return load_dataset(data.name, data.root, **{key: getattr(data, key) for key in same}, **others)


def make_stream(config: RunConfig) -> Stream:
    """Load the dataset and cut it into tasks."""
    data, settings = config.data, asdict(config.stream)
    max_tasks, _ = settings.pop("max_tasks"), settings.pop("online")  # the presets have turned online into epochs
    try:
        built = build_stream(open_dataset(data), **settings)
        built = built if max_tasks is None else built.first(max_tasks)
        built = with_label_noise(built, data.label_noise, data.subsample_seed)
    except ValueError as error:
        raise ConfigError(f"stream: {error}") from error
    require_readable(built, data.name, data.root)
    return built


def evaluated_splits(config: RunConfig) -> tuple[Split, ...]:
    """Return the images that a run is measured on."""
    if config.data.evaluate == "all":
        return ("test", "validation") if config.data.validation > 0 else ("test",)
    return (config.data.evaluate,)


def can_measure_flatness(config: RunConfig) -> bool:
    """Whether flatness is requested and can be measured: by one process, without a loss scale."""
    return config.train.flatness and config.runtime.num_ranks == 1 and config.runtime.precision != "16"


def check_devices(runtime: RuntimeSettings) -> None:
    """Reject devices that this machine does not have, and ranks that torchrun has not started."""
    devices, _ = count_devices(runtime)  # of this host
    has_cuda = torch.cuda.is_available()
    if runtime.accelerator == "cuda" and not has_cuda:
        raise ConfigError("runtime.accelerator is 'cuda', but torch finds no CUDA device here; use cpu or auto.")
    uses_cuda = choose_accelerator(runtime) == "cuda"
    if uses_cuda and devices > torch.cuda.device_count():
        raise ConfigError(
            f"{devices} devices are asked for, but torch finds {torch.cuda.device_count()} CUDA devices here; set "
            "runtime.devices, or torchrun's --nproc-per-node, to as many."
        )
    if runtime.precision == "16" and not uses_cuda:
        raise ConfigError("runtime.precision 16 needs a CUDA device; use 32 or bf16.")


def check_folder(folder: RunFolder, is_resumed: bool) -> None:
    """Reject a run directory that cannot be used, and change nothing."""
    path = folder.path
    if is_resumed and not folder.config_file.is_file():
        raise DataError(f"{str(path)!r} holds no run to resume: it has no config.yaml.")
    reject_links(path, folder.checkpoints)
    try:
        if not is_resumed and path.exists() and (not path.is_dir() or has_content(path)):
            reject_if_owned(path)
            raise DataError(
                f"{str(path)!r} is not empty. Choose another --out, or resume it: cflat run --resume {path}"
            )
    except OSError as error:
        raise DataError(f"The run directory {str(path)!r} cannot be read: {error.strerror}.") from error


def prepare_folder(folder: RunFolder, config: RunConfig, is_resumed: bool) -> None:
    """Make sure, as the owner of the run directory, that this run can be written there."""
    if is_resumed:
        _require_same_run(folder, config)
    elif has_content(folder.path):
        raise DataError(f"{str(folder.path)!r} is not empty: another process got there first. Choose another --out.")
    if folder.checkpoints.exists() and not folder.checkpoints.is_dir():
        raise DataError(f"{str(folder.checkpoints)!r} must be the folder of checkpoints; move it away.")
    CheckpointStore(folder.checkpoints).remove_leftovers()
    require_writable(folder.path)


def _read_result(folder: RunFolder, config: RunConfig) -> RunSummary:
    """Return the result of a finished run, which must be one of this configuration."""
    summary = folder.load_summary()
    require_same(summary.config.identity(), config.identity())
    return summary


def _require_same_run(folder: RunFolder, config: RunConfig) -> None:
    """Reject another run, or another version's, before any data is read."""
    require_same(folder.load_config().identity(), config.identity())
    if not folder.environment_file.is_file():
        return
    begun = folder.load_environment()
    if begun.get("format") != FORMAT or not isinstance(begun.get("identity"), dict):
        raise DataError(
            f"The run in {str(folder.path)!r} was started by another version of cflat and cannot be resumed by "
            "this one; restart the run from scratch, or finish it with that version."
        )
    require_same(begun["identity"], config.identity())


def _describe(folder: RunFolder, config: RunConfig, parts: Assembly, is_resumed: bool) -> str:
    """Write what is known before training, or verify it on resume; return the hash of the images."""
    _require_space(folder.path, parts.method)
    fingerprint = parts.stream.fingerprint()
    if is_resumed and folder.environment_file.is_file():
        before = folder.load_environment()
        if before.get("stream") != fingerprint:
            raise DataError(
                f"The data of the run in {str(folder.path)!r} has changed since it started: other images, or the "
                "same in another order. Restore the old data, or restart the run from scratch."
            )
        # config.yaml stays what the run began with.
        changes = folder.load_config().differences(config)
        if changes:
            resumed = [*before.get("resumed_with", []), changes]
            write_json(folder.environment_file, {**before, "resumed_with": resumed})
    elif not is_resumed or not any(folder.checkpoints.glob("*.pt")):
        # On resume as well, if a kill came between these two files: without a checkpoint the run starts over.
        write_atomic(folder.config_file, config.to_yaml())  # first: with that it can be resumed
        begun = {"format": FORMAT, "identity": config.identity(), "stream": fingerprint, "plugins": loaded_plugins()}
        write_json(folder.environment_file, {**describe_environment(), **begun})
    write_json(folder.stream_file, Outline.of(parts.stream).to_dict())
    return fingerprint


def _require_space(path: Path, method: Method) -> None:
    weights = sum(value.numel() * value.element_size() for value in method.state_dict().values())
    # A lower bound: methods grow, and keep exemplars.
    needed, free = SPARE_BYTES + CHECKPOINT_COPIES * weights, shutil.disk_usage(path).free
    if free < needed:
        raise DataError(
            f"The disk of {str(path)!r} has {free >> 20} MiB left, checkpoints need at least {needed >> 20} MiB. "
            "Free some space or choose another --out."
        )


def make_backbone(
    settings: BackboneSettings, vector_size: int | None = None, *, is_filled_later: bool = False
) -> Backbone:
    """Build the network of a configuration, for images or for vectors of a given size.

    With ``is_filled_later`` the caller loads trained weights, and no others are read.
    """
    return create_backbone(
        settings.name,
        weights=None if is_filled_later or settings.weights == "random" else settings.weights,
        image_size=settings.image_size if vector_size is None else 1,  # vectors are images of one pixel
        num_channels=3 if vector_size is None else vector_size,
        drop_path_rate=settings.drop_path_rate,
        checkpointing=settings.checkpointing,
        width=settings.width,
        depth=settings.depth,
        is_filled_later=is_filled_later,
    )
