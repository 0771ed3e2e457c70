"""Rows of the verified methods: one function each, which runs the original and ours in lockstep.

To add a method, write a function under ``@row("name", "checkout")`` that returns a `Verified`; what it is given are the
checkouts by the names of their options.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import timm.layers.weight_init
import torch
from parity_lockstep import (
    BATCH,
    CLASSES,
    EACH,
    EPOCHS,
    RATE,
    SEED,
    SIZE,
    TASKS,
    Checkout,
    Ours,
    Pairs,
    Recorder,
    Verified,
    adam,
    fresh_backbone,
    module_pairs,
    run_lockstep,
    seed_all,
    sgd,
)
from torch import Tensor, nn

from cflat.nn import Backbone

sys.modules.setdefault("timm.models.layers.weight_init", timm.layers.weight_init)  # where the originals' timm had it
Checkouts = Mapping[str, Checkout]
ROWS: dict[str, tuple[str, Callable[[Checkout], Verified]]] = {}
"""By name: the checkout that a row needs, and what makes it."""
ON_STREAM = f"{TASKS} tasks of {EACH} classes, {EPOCHS} epochs each, float64"
ON_VIT = f"ViT of 6 blocks, {ON_STREAM}"
DECAY, MEMORY, WIDTH, PROJECTIONS = 5e-4, 12, 8, 96
ARGS: dict[str, Any] = {
    "memory_size": MEMORY,
    "memory_per_class": 3,
    "fixed_memory": False,
    "batch_size": BATCH,
    "seed": SEED,
    "init_cls": EACH,
    "increment": EACH,
    "nb_classes": CLASSES,
    "nb_tasks": TASKS,
    "device": [torch.device("cpu")],
    "init_epoch": EPOCHS,
    "epochs": EPOCHS,
    "tuned_epoch": EPOCHS,
    "init_epochs": EPOCHS,
    "later_epochs": EPOCHS,
    "init_lr": RATE,
    "lrate": RATE,
    "later_lr": RATE,
    "min_lr": 0,
    "lrate_decay": 0.1,
    "init_lr_decay": 0.1,
    "weight_decay": DECAY,
    "init_weight_decay": DECAY,
    "milestones": [99],
    "init_milestones": [99],
    "T": 2,
    "optimizer": "sgd",
    "scheduler": "cosine",
    "backbone_type": "vit",
    "pretrained": True,
    "ffn_num": WIDTH,
}
"""What all learners of PILOT are given."""


def row(name: str, checkout: str) -> Callable[[Callable[[Checkout], Verified]], Callable[[Checkout], Verified]]:
    """Enter the row of a method."""

    def enter(make: Callable[[Checkout], Verified]) -> Callable[[Checkout], Verified]:
        ROWS[name] = (checkout, make)
        return make

    return enter


@contextmanager
def learner_of(checkout: Checkout, name: str, make_backbone: Callable[..., Any], **args: Any) -> Iterator[Any]:
    """Give a learner of PILOT on a small network, which is made from its arguments, and the recorder of its batches."""
    with checkout.imported("models.base", f"models.{name}", "utils.inc_net") as modules:
        recorder = Recorder()
        base, own, networks = modules
        for module in (base, own):
            module.DataLoader = recorder
        networks.get_backbone = lambda args, *_: make_backbone(args)
        networks.PromptVitNet.get_original_backbone = lambda *_: plain_queries(fresh_backbone())
        seed_all()
        yield own.Learner({**ARGS, "model_name": name, **args}), recorder


def plain(backbone: Backbone) -> nn.Module:
    """Return the network as PILOT has it: a timm model with ``out_dim``."""
    model = copy.deepcopy(backbone.model)
    model.out_dim = backbone.feature_dim
    return model


def plain_queries(backbone: Backbone) -> Any:
    """Return what PILOT calls the original backbone: features under the name ``pre_logits``."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain(backbone)

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"pre_logits": self.model(images)}

    return Queries().eval()


def logits_of(learner: Any, **how: Any) -> Callable[[Tensor], Tensor]:
    """Return what the network of a learner answers, among the classes so far."""
    return lambda images: learner._network(images, **how)["logits"][:, : learner._total_classes].argmax(1)


def means_of(learner: Any) -> Callable[[Tensor], Tensor]:
    """Return what the class means of a learner answer."""

    def ask(images: Tensor) -> Tensor:
        loader = [(None, images, torch.zeros(len(images)))]
        return torch.from_numpy(learner._eval_nme(loader, learner._class_means)[0][:, 0])

    return ask


def head_pairs(ours: Any, theirs: Any) -> Pairs:
    """Pair two linear or cosine heads."""
    names = [name for name in ("weight", "bias", "sigma") if getattr(ours, name, None) is not None]
    found = [(getattr(ours, name).data, getattr(theirs, name).data) for name in names]
    return [(own, other.view(own.shape)) for own, other in found]


@row("finetune", "pilot")
def finetune(checkout: Checkout) -> Verified:
    """Train everything, the loss over the new classes alone after the first task."""
    with learner_of(checkout, "finetune", lambda args: plain(fresh_backbone())) as (learner, recorder):
        ours = Ours("finetune", fresh_backbone(), sgd(DECAY), classes="new")

        def pairs(task: int) -> Pairs:
            network = ours.method.network
            own = module_pairs(network.backbone.model, learner._network.backbone)
            return [*own, *head_pairs(network.head, learner._network.fc)]

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)})
    return Verified("finetune", checkout.version, ON_VIT, *found, "`classes: new` is PILOT's; our default is all seen")


@row("simplecil", "pilot")
def simplecil(checkout: Checkout) -> Verified:
    """Class means of the frozen network."""
    with learner_of(checkout, "simplecil", lambda args: plain(fresh_backbone())) as (learner, recorder):
        ours = Ours("simplecil", fresh_backbone(), sgd())

        def pairs(task: int) -> Pairs:
            is_done = bool(ours.method.means.counts[-1])
            return [(ours.method.means.means, learner._network.fc.weight.data)] if is_done else []

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)})
    return Verified("simplecil", checkout.version, ON_VIT, *found)


@row("icarl", "pilot")
def icarl(checkout: Checkout) -> Verified:
    """Rehearsal with distillation; exemplars are chosen by each for itself."""
    with learner_of(checkout, "icarl", lambda args: plain(fresh_backbone())) as (learner, recorder):
        ours = Ours("icarl", fresh_backbone(), sgd(DECAY), memory_total=MEMORY)

        def pairs(task: int) -> Pairs:
            network = ours.method.network
            own = module_pairs(network.backbone.model, learner._network.backbone)
            return [*own, *head_pairs(network.head, learner._network.fc)]

        answers = {"cnn": logits_of(learner), "nme": means_of(learner)}
        found = run_lockstep(learner, ours, recorder, pairs, answers)
    return Verified("icarl", checkout.version, ON_VIT, *found)


@row("replay", "pycil")
def replay(checkout: Checkout) -> Verified:
    """Exemplars and cross-entropy, on PyCIL's ResNet-18 for small images."""
    with checkout.imported("models.base", "models.replay") as (base, own):
        recorder = Recorder()
        base.DataLoader = own.DataLoader = recorder
        own.init_epoch = own.epochs = EPOCHS
        own.init_lr = own.lrate = RATE
        own.init_weight_decay = own.weight_decay = DECAY
        own.batch_size, own.init_milestones, own.milestones = BATCH, [99], [99]
        seed_all()
        learner = own.Replay({**ARGS, "convnet_type": "resnet18", "dataset": "cifar100", "model_name": "replay"})
        ours = Ours("replay", fresh_backbone("resnet18_cifar"), sgd(DECAY), memory_total=MEMORY)

        def pairs(task: int) -> Pairs:
            network, theirs = ours.method.network, dict(learner._network.convnet.named_parameters())
            found = [
                (parameter.data, theirs[_PYCIL_STEM.get(name, name)].data)
                for name, parameter in network.backbone.model.named_parameters()
            ]
            return [*found, *head_pairs(network.head, learner._network.fc)]

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)})
    return Verified("replay", checkout.version, f"ResNet-18, 3x3 stem, {ON_STREAM}", *found)


_PYCIL_STEM = {"conv1.weight": "conv1.0.weight", "bn1.weight": "conv1.1.weight", "bn1.bias": "conv1.1.bias"}


@row("memo", "pilot")
def memo(checkout: Checkout) -> Verified:
    """Shared blocks and a last block for each task."""

    def make(args: Any) -> tuple[nn.Module, nn.Module]:
        source, module = fresh_backbone(), importlib.import_module("backbone.vit_memo")
        weights: dict[str, Tensor] = source.model.state_dict()
        shared, special = module.Generalized_Vit(**SHAPE), module.Specialized_Vit(**SHAPE)
        shared.load_state_dict(weights, strict=False)
        last = {key.replace("blocks.5.", "last_block."): value for key, value in weights.items()}
        special.load_state_dict({key: value for key, value in last.items() if "blocks" not in key}, strict=False)
        special.out_dim = source.feature_dim
        return shared, special

    args = {"train_base": False, "train_adaptive": False, "skip": False, "scheduler": "steplr", "alpha_aux": 1.0}
    with learner_of(checkout, "memo", make, **args) as (learner, recorder):
        ours = Ours("memo", fresh_backbone(), sgd(DECAY), memory_total=MEMORY, align=False)

        def pairs(task: int) -> Pairs:
            network, theirs = ours.method.network, learner._network
            found = module_pairs(network.generalised.model, theirs.TaskAgnosticExtractor)
            for stage, extractor in zip(network.stages, theirs.AdaptiveExtractors, strict=True):
                found += module_pairs(stage[0], extractor.last_block) + module_pairs(stage[1], extractor.norm)
            found += head_pairs(network.head, theirs.fc)
            return found if network.auxiliary is None else found + head_pairs(network.auxiliary, theirs.aux_fc)

        found = run_lockstep(learner, ours, recorder, pairs, {"cnn": logits_of(learner)})
    why = "`align: false` and the start of the last block are PILOT's; its class means are wrong: no `nme` compared"
    return Verified("memo", checkout.version, ON_VIT, *found, why)


@row("ease", "pilot")
def ease(checkout: Checkout) -> Verified:
    """Adapters for each task, prototypes over all of them."""
    args = {"use_old_data": False, "use_init_ptm": False, "use_diagonal": False, "recalc_sim": True, "alpha": 0.1}
    more = {"beta": 0, "moni_adam": False, "adapter_num": -1, "use_reweight": True}
    with learner_of(checkout, "ease", adapted("backbone.vit_ease"), **args, **more) as (learner, recorder):
        head = importlib.import_module("backbone.linears").EaseCosineLinear
        head.forward_reweight.__defaults__ = (0.1, 0.0, EACH, EACH, DIM, False)  # 768 features are written into it
        ours = Ours("ease", fresh_backbone(), sgd(DECAY, "cosine"), bottleneck=WIDTH, dropout=0.0)

        def pairs(task: int) -> Pairs:
            method, theirs = ours.method, learner._network
            found = adapter_pairs(method.network.adapters, theirs.backbone.cur_adapter)
            blocks = theirs.fc.weight.data.split(DIM, dim=1)
            return (
                found
                + head_pairs(method.network.head, theirs.proxy_fc)
                + list(zip(method.prototypes, blocks, strict=True))
            )

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner, test=True)})
    return Verified("ease", checkout.version, f"{ON_VIT}, no dropout", *found, "our prototypes are float32")


@row("ranpac", "pilot")
def ranpac(checkout: Checkout) -> Verified:
    """Adapters of the first task, ridge regression on random features."""
    args = {"backbone_type": "vit_adapter", "use_RP": True, "M": PROJECTIONS}
    with learner_of(checkout, "ranpac", adapted("backbone.vit_adapter"), **args) as (learner, recorder):
        settings = {"bottleneck": WIDTH, "dropout": 0.0, "num_projections": PROJECTIONS, "double": True}
        ours = Ours("ranpac", fresh_backbone(), sgd(DECAY, "cosine"), scoring="cosine", **settings)
        # Ours shuffles before it sets a fifth aside to choose the ridge.
        recorder.order = lambda count: torch.randperm(count, generator=torch.Generator().manual_seed(learner._cur_task))

        def pairs(task: int) -> Pairs:
            method, theirs = ours.method, learner._network
            found = adapter_pairs(method.network.adapters, [block.adaptmlp for block in theirs.backbone.blocks])
            if theirs.W_rand is None:
                return found + head_pairs(method.network.head, theirs.fc)
            return [*found, (method.ridge.weight, theirs.fc.weight.data)]

        def share_projection() -> None:
            ours.method.ridge.projection.copy_(learner.W_rand)

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)}, between=share_projection)
    why = "`scoring: cosine` is PILOT's, `linear` the authors'; `double` here"
    return Verified("ranpac", checkout.version, f"{ON_VIT}, no dropout", *found, why)


@row("aper", "pilot")
def aper(checkout: Checkout) -> Verified:
    """Adapters of the first task, means of plain and adapted features."""
    args = {"backbone_type": "vit_adapter"}
    with learner_of(checkout, "aper_adapter", adapted("backbone.vit_adapter"), **args) as (learner, recorder):
        ours = Ours("aper", fresh_backbone(), sgd(DECAY, "cosine"), bottleneck=WIDTH, dropout=0.0)

        def pairs(task: int) -> Pairs:
            method, theirs = ours.method, learner._network
            is_adapted = hasattr(theirs, "backbones")
            tuned = theirs.backbones[1] if is_adapted else theirs.backbone
            found = adapter_pairs(method.network.adapters, [block.adaptmlp for block in tuned.blocks])
            if not is_adapted:
                return found + head_pairs(method.network.head, theirs.fc)
            is_done = bool(method.means.counts[-1])
            return [*found, (method.means.means, theirs.fc.weight.data)] if is_done else found

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)})
    return Verified("aper", checkout.version, f"{ON_VIT}, no dropout", *found)


@row("l2p", "pilot")
def l2p(checkout: Checkout) -> Verified:
    """A pool of prompts; the batch votes, in training and at test."""

    def make(args: Any) -> nn.Module:
        source, module = fresh_backbone(), importlib.import_module("backbone.vit_l2p")
        model = module.VisionTransformer(**SHAPE, **POOL, num_classes=CLASSES, head_type="prompt")
        weights: dict[str, Tensor] = source.model.state_dict()
        first, patches = weights["pos_embed"].split([1, weights["pos_embed"].shape[1] - 1], dim=1)
        slots = first.expand(-1, POOL["prompt_length"] * POOL["top_k"], -1)
        model.load_state_dict({**weights, "pos_embed": torch.cat([first, slots, patches], dim=1)}, strict=False)
        return model

    with learner_of(checkout, "l2p", make, **PROMPTED, shared_prompt_pool=False) as (learner, recorder):
        sizes = {"pool_size": POOL["pool_size"], "length": POOL["prompt_length"], "top_k": POOL["top_k"]}
        ours = Ours("l2p", fresh_backbone(), adam(), **sizes)

        def pairs(task: int) -> Pairs:
            prompts, theirs = ours.method.network.prompts, learner._network.backbone
            found = [
                (prompts.prompts.data, theirs.prompt.prompt.data),
                (prompts.keys.data, theirs.prompt.prompt_key.data),
            ]
            return found + seen_rows(ours.method.network.head, theirs.head)

        answers = {"batchwise": lambda images: logits_of(learner, task_id=learner._cur_task)(images)}
        found = run_lockstep(learner, ours, recorder, pairs, answers, train="_init_train")
    return Verified(
        "l2p", checkout.version, ON_VIT, *found, "the headline is `instancewise`; PILOT has `batchwise` alone"
    )


@row("dualprompt", "pilot")
def dualprompt(checkout: Checkout) -> Verified:
    """Prefixes for all tasks and for one."""
    layers = {"g_prompt_layer_idx": [0, 1], "e_prompt_layer_idx": [2, 3, 4], "g_prompt_length": POOL["prompt_length"]}
    how = {"use_g_prompt": True, "use_e_prompt": True, "use_prefix_tune_for_g_prompt": True}
    how |= {"use_prefix_tune_for_e_prompt": True, "same_key_value": False}

    def make(args: Any) -> nn.Module:
        source, module = fresh_backbone(), importlib.import_module("backbone.vit_dualprompt")
        pool = {**POOL, "top_k": 1, "use_prompt_mask": True}
        model = module.VisionTransformer(**SHAPE, **pool, **layers, **how, num_classes=CLASSES, head_type="token")
        model.load_state_dict(source.model.state_dict(), strict=False)
        return model

    args = {**PROMPTED, **how, "top_k": 1, "shared_prompt_pool": True}
    with learner_of(checkout, "dualprompt", make, **args) as (learner, recorder):
        sizes = {"pool_size": POOL["pool_size"], "length": POOL["prompt_length"]}
        ours = Ours("dualprompt", fresh_backbone(), adam(), legacy_layout=True, untrained_experts=True, **sizes)

        def pairs(task: int) -> Pairs:
            prompts, theirs = ours.method.network.prompts, learner._network.backbone
            found = [(prompts.general.data, theirs.g_prompt.data), (prompts.experts.data, theirs.e_prompt.prompt.data)]
            found.append((prompts.keys.data, theirs.e_prompt.prompt_key.data))
            return found + seen_rows(ours.method.network.head, theirs.head)

        answers = {"batchwise": lambda images: logits_of(learner, task_id=learner._cur_task)(images)}
        found = run_lockstep(learner, ours, recorder, pairs, answers, train="_init_train")
    why = "`legacy_layout` and `untrained_experts` are PILOT's; the headline is `instancewise`"
    return Verified("dualprompt", checkout.version, ON_VIT, *found, why)


@row("lwf", "pycil")
def lwf(checkout: Checkout) -> Verified:
    """Distillation from the previous network, on PyCIL's ResNet-18 for small images."""
    with checkout.imported("models.base", "models.lwf") as (base, own):
        recorder = Recorder()
        base.DataLoader = own.DataLoader = recorder
        own.init_epoch = own.epochs = EPOCHS
        own.init_lr = own.lrate = RATE
        own.init_weight_decay = own.weight_decay = DECAY
        own.batch_size, own.init_milestones, own.milestones = BATCH, [99], [99]
        seed_all()
        learner = own.LwF({**ARGS, "convnet_type": "resnet18", "dataset": "cifar100", "model_name": "lwf"})
        ours = Ours("lwf", fresh_backbone("resnet18_cifar"), sgd(DECAY))

        def pairs(task: int) -> Pairs:
            network, theirs = ours.method.network, dict(learner._network.convnet.named_parameters())
            found = [
                (parameter.data, theirs[_PYCIL_STEM.get(name, name)].data)
                for name, parameter in network.backbone.model.named_parameters()
            ]
            return [*found, *head_pairs(network.head, learner._network.fc)]

        found = run_lockstep(learner, ours, recorder, pairs, {"logits": logits_of(learner)})
    why = "`weighting: toolbox` is PyCIL's; `paper` has one term for each old task"
    return Verified("lwf", checkout.version, f"ResNet-18, 3x3 stem, {ON_STREAM}", *found, why)


class OffLeaf:
    """Stands in for torch where PILOT adds to zeros that require gradients: possible only once they were moved."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *given: Any, **more: Any) -> Tensor:
        """Return zeros that are no leaf, as they are after a move to a GPU."""
        return torch.zeros(*given, **more) * 1


@row("coda_prompt", "pilot")
def coda_prompt(checkout: Checkout) -> Verified:
    """Prompts mixed from components; those of earlier tasks are frozen."""
    each, length, weight = 2, 4, 0.1

    def make(args: Any) -> nn.Module:
        module = importlib.import_module("backbone.vit_coda_promtpt")
        module.torch = OffLeaf()
        model: nn.Module = module.VisionTransformer(**SHAPE, num_classes=0)
        model.load_state_dict(fresh_backbone().model.state_dict(), strict=False)
        return model

    param = [each * TASKS, length, weight]
    args = {"optimizer": "adam", "scheduler": "constant", "weight_decay": 0, "prompt_param": param}
    with learner_of(checkout, "coda_prompt", make, **args) as (learner, recorder):
        theirs = learner._network
        theirs.prompt = importlib.import_module("backbone.prompt").CodaPrompt(DIM, TASKS, param, key_dim=DIM).double()
        theirs.fc = nn.Linear(DIM, CLASSES)  # 768 features are written into the original
        ours = Ours("coda_prompt", fresh_backbone(), adam(), components=each, length=length, orthogonality=weight)

        def pairs(task: int) -> Pairs:
            components = ours.method.network.components
            found: Pairs = []
            for kind, members in (("p", components.prompts), ("k", components.keys), ("a", components.attention)):
                for number, member in enumerate(members):
                    for layer, own in zip(components.layers, member.data, strict=True):
                        pool = getattr(theirs.prompt, f"e_{kind}_{layer}").data
                        found.append((own, pool[number * each : (number + 1) * each]))
            return found + seen_rows(ours.method.network.head, theirs.fc)

        answers = {"logits": lambda images: theirs(images)[:, : learner._total_classes].argmax(1)}
        found = run_lockstep(learner, ours, recorder, pairs, answers)
    why = "components per task, not in total; a constant rate here"
    return Verified("coda_prompt", checkout.version, ON_VIT, *found, why)


@row("slca", "slca")
def slca(checkout: Checkout) -> Verified:
    """A slow backbone; a head aligned with the numbers that the original drew, before which it is compared, too."""
    states: list[Tensor] = []
    align = {"align_epochs": EPOCHS, "align_lr": RATE, "align_weight_decay": DECAY}
    with checkout.imported("models.base", "models.slca", "utils.inc_net", "convs.vits") as (base, own, networks, vits):
        recorder = Recorder()
        base.DataLoader = own.DataLoader = recorder
        own.batch_size, own.weight_decay = BATCH, DECAY
        networks.get_convnet = lambda *_: _slca_network(vits)
        seed_all()
        args = {"model_postfix": "", "prefix": "", "run_id": 0, "lr": RATE, "ca_epochs": EPOCHS}
        learner = own.SLCA({**ARGS, **args, "model_name": "slca", "ca_with_logit_norm": 0.1})
        learner.save_checkpoint = lambda *_, **__: None
        theirs, drawing = learner._network, learner._stage2_compact_classifier

        def note_state(task_size: int) -> None:
            states[:] = [torch.get_rng_state()]
            with in_doubles():
                drawing(task_size)

        learner._stage2_compact_classifier = note_state
        ours = Ours("slca", fresh_backbone(), sgd(DECAY), **align)

        def pairs(task: int) -> Pairs:
            method, found = ours.method, module_pairs(ours.method.network.backbone.model, theirs.convnet)
            trained, aligned = getattr(theirs.fc, "old_state_dict", {}), theirs.fc.state_dict()
            is_done = len(trained) == len(aligned)
            for heads, others in ((method.network.head, trained), (method.aligned, aligned)):
                members = others.values() if is_done else aligned.values()
                found += [(mine.data, other) for mine, other in zip(heads.parameters(), members, strict=True)]
            if is_done:
                factors = torch.linalg.cholesky(learner._class_covs)
                found += [(method.gaussians.means, torch.from_numpy(learner._class_means))]
                found += [(method.gaussians.factors, factors)]
            return found

        def same_numbers() -> None:
            if states:
                torch.set_rng_state(states[0])

        answers = {"logits": logits_of(learner)}
        found = run_lockstep(learner, ours, recorder, pairs, answers, train="_stage1_training", between=same_numbers)
    why = "the original aligns with the rate of training, ours with `align_lr`, and draws in float32: here in float64"
    return Verified("slca", checkout.version, ON_VIT, *found, why)


def _slca_network(vits: Any) -> nn.Module:
    """Return the authors' ViT with the weights of ours."""
    model: nn.Module = vits.VisionTransformer(**SHAPE, num_classes=0)
    model.load_state_dict(fresh_backbone().model.state_dict())
    model.out_dim = DIM
    return model


@contextmanager
def in_doubles() -> Iterator[None]:
    """Let ``tensor.float()`` keep double precision, where an original would round in between."""
    single = Tensor.float
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = single  # type: ignore[method-assign]


SHAPE: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": 2,
    "embed_dim": 64,
    "depth": 6,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}
"""The ViT ``vit_smoke``, as PILOT's classes are told."""
DIM: int = SHAPE["embed_dim"]
POOL: dict[str, Any] = {
    "prompt_length": 3,
    "pool_size": 5,
    "top_k": 2,
    "prompt_pool": True,
    "prompt_key": True,
    "batchwise_prompt": True,
    "embedding_key": "cls",
    "prompt_init": "uniform",
    "prompt_key_init": "uniform",
}
PROMPTED: dict[str, Any] = {
    "get_original_backbone": True,
    "freeze": ["blocks", "patch_embed", "cls_token", "norm", "pos_embed"],
    "optimizer": "adam",
    "scheduler": "constant",
    "reinit_optimizer": True,
    "weight_decay": 0,
    "top_k": 2,
    "prompt_pool": True,
    "shared_prompt_key": False,
    "size": 5,
    "pull_constraint": True,
    "pull_constraint_coeff": 0.1,
}


def seen_rows(ours: nn.Module, theirs: nn.Linear) -> Pairs:
    """Pair a head that grows with one that has all classes from the start."""
    return [
        (own.data, other.data[: len(own)]) for own, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


def adapter_pairs(ours: Any, theirs: Any) -> Pairs:
    """Pair the adapters of all blocks."""
    found: Pairs = []
    for own, other in zip(ours, theirs, strict=True):
        found += module_pairs(own.down, other.down_proj) + module_pairs(own.up, other.up_proj)
    return found


def adapted(module: str) -> Callable[[Any], nn.Module]:
    """Return what makes PILOT's ViT with adapters, without dropout; the plain one where it asks for that."""

    def make(args: Any) -> nn.Module:
        source = fresh_backbone()
        if module == "backbone.vit_adapter" and "adapter" not in args["backbone_type"]:
            return plain(source)
        own = importlib.import_module(module)
        adapter = getattr(own, "_adapter", own.Adapter)
        own._adapter = adapter
        own.Adapter = lambda *given, **more: adapter(*given, **{**more, "dropout": 0.0})
        option = {"ffn_adapt": True, "ffn_option": "parallel", "ffn_adapter_layernorm_option": "none", "vpt_num": 0}
        option |= {"ffn_adapter_init_option": "lora", "ffn_adapter_scalar": "0.1", "ffn_num": WIDTH, "d_model": DIM}
        config = SimpleNamespace(**option, vpt_on=False, _device=torch.device("cpu"))
        model = own.VisionTransformer(**SHAPE, num_classes=0, tuning_config=config)
        missing = model.load_state_dict(_split_attention(source.model.state_dict()), strict=False).missing_keys
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in missing)
        model.out_dim = source.feature_dim
        return model

    return make


def _split_attention(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a ViT's weights under the names of AdaptFormer's."""
    found: dict[str, Tensor] = {}
    for key, value in weights.items():
        if ".qkv." in key:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                found[key.replace("qkv", f"{part}_proj")] = rows
        else:
            found[key.replace(".mlp.", ".")] = value
    return found
