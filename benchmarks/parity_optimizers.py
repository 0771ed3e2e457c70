"""Rows of the verified optimizers: one function each, which takes the original and ours through the same steps.

To add an optimizer, write a function under ``@row("name", "checkout")`` that says how the original steps and with which
settings ours does the same; see `verify`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from parity_lockstep import SEED, Checkout, Verified
from torch import Tensor, nn
from torch.nn import functional

import cflat

ROWS: dict[str, tuple[str, Callable[[Checkout], Verified]]] = {}
"""By name: the checkout that a row needs, and what makes it; torch itself needs none."""
STEPS, BATCH, RATE, DECAY, RHO = 40, 12, 0.05, 1e-3, 0.1
ON = f"MLP of two layers, {STEPS} steps of SGD with momentum and weight decay, float64"
Step = Callable[[Tensor, Tensor], None]
"""One step of an original on a batch."""


def row(name: str, checkout: str) -> Callable[[Callable[[Checkout], Verified]], Callable[[Checkout], Verified]]:
    """Enter the row of an optimizer."""

    def enter(make: Callable[[Checkout], Verified]) -> Callable[[Checkout], Verified]:
        ROWS[name] = (checkout, make)
        return make

    return enter


def verify(
    name: str,
    original: str,
    make: Callable[[nn.Module], Step],
    settings: Mapping[str, Any],
    *,
    on_purpose: str = "",
    has_bias: bool = True,
    settle: Callable[[], None] = lambda: None,
    make_ours: Callable[[nn.Module], Any] | None = None,
) -> Verified:
    """Train two copies of a network, one with the original and one with ours, and compare them.

    Args:
        name: Of ours.
        original: Repository, commit and date.
        make: Builds the original on a network and returns what makes one step.
        settings: Keywords of ours.
        on_purpose: What differs by decision.
        has_bias: Whether the network has biases.
        settle: Brings the original's weights to where it would save them.
        make_ours: Builds ours, unless it is a wrapper around SGD.
    """
    torch.manual_seed(SEED)
    theirs = nn.Sequential(nn.Linear(6, 9, bias=has_bias), nn.Tanh(), nn.Linear(9, 4, bias=has_bias))
    ours = nn.Sequential(nn.Linear(6, 9, bias=has_bias), nn.Tanh(), nn.Linear(9, 4, bias=has_bias))
    ours.load_state_dict(theirs.state_dict())
    start = [parameter.detach().clone() for parameter in ours.parameters()]
    centres = torch.randn(4, 6)
    step = make(theirs)
    optimizer = (
        cflat.create_optimizer(name, sgd(ours.parameters()), model=ours, **settings)
        if make_ours is None
        else make_ours(ours)
    )
    for _ in range(STEPS):
        targets = torch.randint(4, (BATCH,))
        inputs = centres[targets] + torch.randn(BATCH, 6)
        step(inputs, targets)
        optimizer.step(closure_of(ours, inputs, targets, optimizer))
    settle()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    difference = max(float((own - other).abs().max()) for own, other in pairs)
    if all(torch.equal(before, own) for before, (own, _) in zip(start, pairs, strict=True)):
        raise RuntimeError(f"{name} has changed no weight: nothing was compared.")
    probes = centres.repeat(20, 1) + torch.randn(80, 6)
    same = bool((ours(probes).argmax(1) == theirs(probes).argmax(1)).all())
    return Verified(name, original, ON if has_bias else f"{ON}, no biases", difference, same, on_purpose)


def sgd(parameters: Any, **more: Any) -> torch.optim.SGD:
    """Return the base optimizer of both."""
    return torch.optim.SGD(parameters, **{**BASE, **more})


BASE: dict[str, Any] = {"lr": RATE, "momentum": 0.9, "weight_decay": DECAY}


def closure_of(model: nn.Module, inputs: Tensor, targets: Tensor, optimizer: Any) -> Callable[[], Tensor]:
    """Return torch's closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    return closure


def two_passes(model: nn.Module, optimizer: Any) -> Step:
    """Return a step in the style of davda54/sam: a backward pass before, and a closure for the other."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        closure = closure_of(model, inputs, targets, optimizer)
        closure()
        optimizer.step(closure)

    return step


def loss_lists(model: nn.Module, optimizer: Any) -> Step:
    """Return a step in the style of C-Flat and INFTY: a function that gives logits and a list of losses."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        def loss() -> tuple[Tensor, list[Tensor]]:
            logits = model(inputs)
            return logits, [functional.cross_entropy(logits, targets)]

        optimizer.set_closure(loss)
        optimizer.step()

    return step


def named_closure(model: nn.Module, optimizer: Any) -> Step:
    """Return a step in the style of GSAM and GAM: loss, inputs and targets are set, then a step is made."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.set_closure(functional.cross_entropy, inputs, targets)
        optimizer.step()

    return step


@row("none", "torch")
def plain(checkout: Checkout) -> Verified:
    """The base optimizer alone."""

    def make(model: nn.Module) -> Step:
        optimizer = sgd(model.parameters())
        return lambda inputs, targets: optimizer.step(closure_of(model, inputs, targets, optimizer)) and None

    return verify("none", checkout.version, make, {})


@row("sam", "sam")
def sam(checkout: Checkout) -> Verified:
    """SAM."""
    with checkout.imported("sam") as (module,):
        make = lambda model: two_passes(model, module.SAM(model.parameters(), torch.optim.SGD, rho=RHO, **BASE))  # noqa: E731
        return verify("sam", checkout.version, make, {"rho": RHO})


@row("ss_sam", "sam")
def ss_sam(checkout: Checkout) -> Verified:
    """SAM on some steps: the original's two passes where a fixed coin says so, else its base optimizer."""

    def coin(step: int) -> float:
        return float(step % 3 != 1)

    with checkout.imported("sam") as (module,):

        def make(model: nn.Module) -> Step:
            optimizer, count = module.SAM(model.parameters(), torch.optim.SGD, rho=RHO, **BASE), iter(range(STEPS))

            def step(inputs: Tensor, targets: Tensor) -> None:
                closure = closure_of(model, inputs, targets, optimizer)
                closure()
                (lambda: optimizer.step(closure))() if coin(next(count)) else optimizer.base_optimizer.step()

            return step

        why = "no public PyTorch code; SAM's steps on the same coin, which ours draws from seed and step"
        return verify("ss_sam", checkout.version, make, {"rho": RHO, "p": coin}, on_purpose=why)


@row("vasso", "vasso")
def vasso(checkout: Checkout) -> Verified:
    """VaSSO."""
    with checkout.imported("solver.vasso") as (module,):

        def make(model: nn.Module) -> Step:
            optimizer = module.VASSO(model.parameters(), sgd(model.parameters()), rho=RHO, theta=0.4)
            return two_passes(model, optimizer)

        why = "the original adds 1e-7 to the norm of d, ours 1e-12"
        return verify("vasso", checkout.version, make, {"rho": RHO, "theta": 0.4}, on_purpose=why)


@row("asam", "asam")
def asam(checkout: Checkout) -> Verified:
    """ASAM."""
    with checkout.imported("asam") as (module,):

        def make(model: nn.Module) -> Step:
            optimizer = module.ASAM(sgd(model.parameters()), model, rho=RHO, eta=0.01)

            def step(inputs: Tensor, targets: Tensor) -> None:
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.ascent_step()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.descent_step()

            return step

        why = "ours scales biases, too"
        return verify("asam", checkout.version, make, {"rho": RHO, "eta": 0.01}, on_purpose=why, has_bias=False)


@row("gsam", "gsam")
def gsam(checkout: Checkout) -> Verified:
    """GSAM at a constant radius."""
    with checkout.imported("gsam.gsam") as (module,):
        constant = SimpleNamespace(step=lambda: RHO)

        def make(model: nn.Module) -> Step:
            base = sgd(model.parameters())
            optimizer = module.GSAM(model.parameters(), base, model, gsam_alpha=0.3, rho_scheduler=constant)
            return named_closure(model, optimizer)

        return verify("gsam", checkout.version, make, {"rho": RHO, "alpha": 0.3})


@row("gam", "gam")
def gam(checkout: Checkout) -> Verified:
    """GAM, the accelerated form."""
    with checkout.imported("gam.gam") as (module,):
        radii = {"grad_rho_scheduler": SimpleNamespace(step=lambda: 0.02)}
        radii["grad_norm_rho_scheduler"] = SimpleNamespace(step=lambda: RHO)
        betas = SimpleNamespace(grad_beta_1=0.6, grad_beta_2=-0.5, grad_beta_3=0.4, grad_gamma=0.03)

        def make(model: nn.Module) -> Step:
            base = sgd(model.parameters())
            return named_closure(model, module.GAM(model.parameters(), base, model, args=betas, **radii))

        settings = {"rho": RHO, "rho_fd": 0.02, "gamma": 0.03, "betas": (0.6, -0.5, 0.4)}
        return verify("gam", checkout.version, make, settings)


@row("friendly_sam", "fsam")
def friendly_sam(checkout: Checkout) -> Verified:
    """Friendly SAM."""
    with checkout.imported("utils") as (module,):

        def make(model: nn.Module) -> Step:
            optimizer = module.FriendlySAM(model.parameters(), torch.optim.SGD, rho=RHO, sigma=1, lmbda=0.9, **BASE)
            return two_passes(model, optimizer)

        return verify("friendly_sam", checkout.version, make, {"rho": RHO, "sigma": 1.0, "decay": 0.9})


@row("msam", "msam")
def msam(checkout: Checkout) -> Verified:
    """MSAM, which is SGD and the wrapper in one there."""
    made: list[Any] = []
    with checkout.imported("optimizer.msam") as (module,):

        def make(model: nn.Module) -> Step:
            optimizer = module.MSAM(model.parameters(), rho=RHO, **BASE)
            made.append(optimizer)

            def step(inputs: Tensor, targets: Tensor) -> None:
                closure_of(model, inputs, targets, optimizer)()
                optimizer.step()

            return step

        def settle() -> None:
            (optimizer,) = made
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    ahead = optimizer.state[parameter]["momentum_buffer"] * group["inverse_norm_buffer"]
                    parameter.data.add_(ahead, alpha=group["rho"])

        why = "our weights are back at theta between steps; the original's are compared after its own way back"
        return verify("msam", checkout.version, make, {"rho": RHO, "momentum": 0.9}, on_purpose=why, settle=settle)


@row("looksam", "msam")
def looksam(checkout: Checkout) -> Verified:
    """LookSAM with global norms, as MSAM's authors wrote it."""
    _stub("utility.args", Args=SimpleNamespace(add_argument=lambda *_, **__: None))
    _stub("utility.loss", smooth_crossentropy=lambda logits, y: functional.cross_entropy(logits, y, reduction="none"))
    try:
        with checkout.imported("optimizer.looksam") as (module,):

            def make(model: nn.Module) -> Step:
                optimizer = module.LookSAM(model.parameters(), rho=RHO, alpha=0.7, k=5, **BASE)
                network = _Wrapped(model)

                def step(inputs: Tensor, targets: Tensor) -> None:
                    optimizer.zero_grad()
                    optimizer.step(network, inputs, targets)

                return step

            return verify("looksam", checkout.version, make, {"rho": RHO, "alpha": 0.7, "k": 5})
    finally:
        for name in ("utility", "utility.args", "utility.loss"):
            sys.modules.pop(name, None)


class _Wrapped:
    """A network as MSAM's script hands it to its optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.module = SimpleNamespace(setBatchNormTracking=lambda is_on: None)

    def __call__(self, inputs: Tensor) -> Any:
        return self.model(inputs)


@row("c_flat", "cflat")
def c_flat(checkout: Checkout) -> Verified:
    """C-Flat, as its authors released it."""
    with checkout.imported("optims.c_flat") as (module,):

        def make(model: nn.Module) -> Step:
            base = sgd(model.parameters())
            optimizer = module.C_Flat(model.parameters(), base, model, cflat=True, rho=RHO, lamb=0.2)
            return loss_lists(model, optimizer)

        return verify("c_flat", checkout.version, make, {"rho": RHO, "lam": 0.2})


@row("c_flat_plus", "infty")
def c_flat_plus(checkout: Checkout) -> Verified:
    """C-Flat++ of INFTY."""
    source = Checkout(checkout.name, checkout.path / "src")
    sys.modules.setdefault("seaborn", ModuleType("seaborn"))  # its figures, which are imported with everything
    with source.imported("infty.optim.flat_landscape.c_flat") as (module,):
        args = {"strategy": "plus", "rho": RHO, "lamb": 0.2, "A": 2.0, "k": 0.3, "t0": 8, "cof": 0.8}

        def make(model: nn.Module) -> Step:
            optimizer = module.C_Flat(model.parameters(), sgd(model.parameters()), model, args)
            optimizer.grad_norm_rho = RHO  # its first release had rho there
            return loss_lists(model, optimizer)

        settings = {"rho": RHO, "lam": 0.2, "amplitude": 2.0, "steepness": 0.3, "midpoint": 8.0, "gain": 0.8}
        why = "INFTY moves by 1 along g_s - g and not by rho, which C-Flat's own release and ours do; set to rho here"
        return verify("c_flat_plus", source.version, make, settings, on_purpose=why)


@row("qhm", "qhoptim")
def qhm(checkout: Checkout) -> Verified:
    """QHM, a base optimizer."""
    optimizer_module = importlib.import_module("torch.optim.optimizer")
    if not hasattr(optimizer_module, "required"):  # newer torch has no such name
        optimizer_module.required = object()
    with checkout.imported("qhoptim.pyt.qhm") as (module,):
        settings = {"lr": 0.2, "momentum": 0.9, "nu": 0.7, "weight_decay": DECAY}

        def make(model: nn.Module) -> Step:
            optimizer = module.QHM(model.parameters(), **settings)
            return lambda inputs, targets: optimizer.step(closure_of(model, inputs, targets, optimizer)) and None

        return verify("qhm", checkout.version, make, {}, make_ours=lambda m: cflat.QHM(m.parameters(), **settings))


def _stub(name: str, **members: Any) -> None:
    """Stand in for a module of a checkout that reads a command line."""
    for part in (name.partition(".")[0], name):
        sys.modules.setdefault(part, ModuleType(part))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)
