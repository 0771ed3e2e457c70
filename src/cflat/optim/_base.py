"""`SharpnessAware`: what every optimizer of the family shares, so that an algorithm is nothing but its formula."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler at once
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from cflat._errors import ClosureError
from cflat._ranges import CountOrZero, Positive, check, checked
from cflat.optim._callers import is_absent, reject_late_changes, reject_scaler, reject_skipped_micro_batches
from cflat.optim._checkpoint import VERSION, load_memories, reject_foreign_state, reject_foreign_tensors
from cflat.optim._guards import BufferGuard, RandomGuard
from cflat.optim._memory import DirectionMemory
from cflat.optim._passes import Direction, Evaluation, Passes
from cflat.optim._schedules import Radius
from cflat.optim._telemetry import Branch, Outcome, Telemetry
from cflat.optim._vectors import Coefficients
from cflat.optim._weights import Weights
from cflat.optim._wrapper import Wrapper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SharpnessAware", "StepOptions"]


@checked
@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is taken; the same for every algorithm.

    Args:
        max_norm: Clip gradients to this global norm; None does not clip.
        clip: Clip the ``"final"`` direction only, or ``"each"`` gradient as well as it is computed.
        replay_rng: Let all evaluations of a step see the same dropout masks.
        guard_buffers: Undo what extra evaluations do to the buffers of ``model``.
        perturbation: ``"synced"``: all ranks perturb alike, by the averaged gradient (equals one large batch).
            ``"local"``: each rank perturbs by its own gradient (m-sharpness) and only the direction is averaged;
            needs ``model`` to be wrapped in DistributedDataParallel.
        process_group: The ranks that must take the same decisions. ``"auto"``: all of them if torch.distributed is
            initialized; None: this process decides alone.
    """

    max_norm: Positive | None = None
    clip: Literal["final", "each"] = "final"
    replay_rng: bool = True
    guard_buffers: bool = True
    perturbation: Literal["synced", "local"] = "synced"
    process_group: ProcessGroup | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.process_group, str) and self.process_group != "auto":
            raise ValueError(f"process_group must be a ProcessGroup, 'auto' or None, got {self.process_group!r}.")


def _gradients_enabled() -> AbstractContextManager[None]:
    """Return a context for closures; usually gradients are enabled already, and torch's costs microseconds."""
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


class SharpnessAware(Wrapper):
    """Wrap a torch optimizer so that it descends along a direction computed from several evaluations.

    A subclass writes `direction`, and names its counters in `scalars`. Everything else happens here and in `Passes`:
    parameter groups, state and learning rates belong to ``base``; weights are restored by copy on every exit; a step
    with an Inf or NaN gradient is skipped; checkpoints are complete.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation in parameter space: a positive number, or a schedule (`InverseSqrt`); None for
            an optimizer that does not perturb. A parameter group may have its own ``"rho"``, and 0 there trains the
            group without perturbing it; so may ``"lam"``.
        options: How steps are taken; see `StepOptions`.
    """

    # Makes GradScaler announce itself instead of stepping us with scaled gradients; see `step`.
    _step_supports_amp_scaling = True

    scalars: tuple[str, ...] = ()
    """Attributes that a checkpoint must hold; they are also put back when a step is rolled back."""

    # Whether gradients that were accumulated before a step may simply be added to: true of one evaluation at theta.
    _adds_to_gradients = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Ranges are enforced without a decorator, in plug-ins, too. An inherited __init__ is checked already.
        if "__init__" in cls.__dict__:
            checked(cls)

    @checked
    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius | None = None,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base)
        if not isinstance(options, StepOptions | None):
            raise ValueError(f"options must be a StepOptions, for example StepOptions(max_norm=1.0), got {options!r}.")
        self.options = options or StepOptions()
        self.telemetry = Telemetry()
        self.task_index = 0
        self.task_step = 0
        self._radius = rho
        self._memories: dict[str, DirectionMemory] = defaultdict(DirectionMemory)
        self._model = model
        self._buffers = BufferGuard(model if self.options.guard_buffers else None)
        self._random = RandomGuard(self.options.replay_rng)
        self._gradient_hooks: OrderedDict[int, Callable[[Evaluation], None]] = OrderedDict()
        self._in_flight: weakref.ref[Passes] | None = None
        self._noted: dict[str, Any] = {}  # by the step in flight, for the telemetry
        self._saved_state: dict[str, Any] = {}  # from before the step in flight
        self._has_just_looped = False

    # -- the algorithm ------------------------------------------------------------------------------------------

    @abstractmethod
    def direction(self, weights: Weights) -> Direction:
        """Yield for each gradient that is needed, move ``weights`` in between, return the direction of descent."""
        raise NotImplementedError

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, and what is put back when a step is rolled back: the `scalars`."""
        return {name: getattr(self, name) for name in self.scalars}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `extra_state` returned."""
        for name in self.scalars:
            setattr(self, name, state[name])

    @checked
    def start_task(self, index: CountOrZero, num_tasks: int | None = None) -> None:
        """Begin a task: forget directions and statistics of the one before.

        Args:
            index: Position of the task in the stream, from 0.
            num_tasks: Length of the stream, if it is known.
        """
        if num_tasks is not None:
            check("num_tasks", num_tasks, above=index, integer=True)
        self.discard_step()
        self.task_index, self.task_step = index, 0
        for memory in self._memories.values():
            memory.clear()
        self.telemetry.cache_age.clear()

    @property
    def rho(self) -> float:
        """The radius of the present step for groups without one of their own; 0 for an optimizer that has none."""
        if not callable(self._radius):
            return self._radius or 0.0
        step = self.telemetry.steps
        radius = float(self._radius(step, float(self.param_groups[0]["lr"])))
        check(f"rho at step {step}", radius, at_least=0)  # 0 makes the step plain
        return radius

    def per_group(self, name: str, weights: Weights) -> float | Coefficients:
        """Return the setting ``name`` of this optimizer, or one number for each parameter if a group has its own."""
        common: float = getattr(self, name)
        own = {param: group[name] for group in self.param_groups if name in group for param in group["params"]}
        if not own:
            return common
        for value in own.values():
            check(f"{name} of a parameter group", value, at_least=0)
        return Coefficients(own.get(param, common) for param in weights.params)

    def memory(self, name: str) -> DirectionMemory:
        """Return the direction that is remembered under ``name`` from step to step."""
        return self._memories[name]

    def count(self, branch: Branch, outcome: Outcome, **norms: float) -> None:
        """Note what this step did in one branch; becomes part of the telemetry when the step completes."""
        self._noted[branch] = outcome
        self.note(**norms)

    def cache_age(self) -> dict[str, int]:
        """Return for each cached branch the steps since its exact computation; optimizers with caches override it."""
        return {}

    def note(self, **numbers: float) -> None:
        """Note numbers of this step (see `Telemetry.add_step`); counted when it completes."""
        self._noted.update(numbers)

    # -- the two doors ------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scaler: Any = None,
        replay: Callable[[int], Any] | None = None,
    ) -> Any:
        """Take one step and return what the closure returned in its first evaluation.

        That is the loss at the weights where the step begins, except with `MSAM`, `AsyncSAM` and `RandomSAM`: they
        evaluate at perturbed weights only.

        Directly after a loop over `passes`, which has stepped already, ``step()`` does nothing: trainers that call it
        after every batch need no change.

        Args:
            closure: Computes the loss, calls backward and returns the loss. It is called as often as the algorithm
                needs; gradients are cleared before each call.
            scaler: The GradScaler with which the closure scales its loss (float16); call its ``update()`` after.
            replay: Computes again, at the present weights, the gradients that were accumulated before this step. They
                then are part of its first evaluation, and ``replay(index)`` is called before the closure in the others;
                in the first as well (index 0) if it is not at the weights where they were accumulated.
        """
        reject_scaler(self)
        if closure is None:
            raise ClosureError(
                f"{type(self).__name__}.step() needs a closure that computes the loss, calls backward and returns the "
                "loss; got None. Write optimizer.step(closure), or loop over optimizer.passes()."
            )
        if replay is None:
            reject_skipped_micro_batches(self)
        result = None
        with _gradients_enabled(), Passes(self, scaler, accumulated=replay is not None, is_loop=False) as passes:
            for index in passes:
                if replay is not None and passes.replays:
                    replay(index)
                passes.loss = value = closure()
                result = value if index == 0 else result
        return result

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` as torch does, and let the call after a loop over `passes` run neither it nor hooks.

        Torch's wrapper takes as long as a small network's forward pass, so it is left out where nothing listens.
        """
        # Torch's constructor patches `step` of each class with this method, so this override reaches all subclasses.
        hooked = Optimizer.profile_hook_step(func)

        @_disable_dynamo  # a graph that was traced through moves and decisions would be wrong
        @wraps(func)
        def step(self: SharpnessAware, closure: Any = None, **options: Any) -> Any:
            closure = None if is_absent(closure) else closure
            if closure is None and self._has_just_looped:
                self._has_just_looped = False
                reject_late_changes(self.all_params())
                return None
            return (hooked if self._is_observed else func)(self, closure, **options)

        return step

    @property
    def _is_observed(self) -> bool:
        """Whether a profiler runs, or hooks have to be called around `step`."""
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        everybody = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return bool(own or everybody or profiler._is_profiler_enabled)

    @_disable_dynamo
    def passes(self, *, scaler: Any = None, accumulated: bool = False) -> Passes:
        """Return the evaluations of one step as an iterator; see `Passes`.

        Args:
            scaler: The GradScaler with which the loss is scaled (float16); call its ``update()`` after the loop.
            accumulated: Whether the gradients that are there already are the beginning of the first evaluation;
                ``passes.replays`` then says in which iterations they have to be computed again.
        """
        self.discard_step()
        return Passes(self, scaler, accumulated=accumulated)

    def discard_step(self) -> None:
        """Roll back a step whose loop over `passes` was left; nothing remains of it."""
        passes = None if self._in_flight is None else self._in_flight()
        if passes is not None:
            passes.close(interrupted=True)
        self._in_flight = None

    def register_gradient_hook(self, hook: Callable[[Evaluation], None]) -> RemovableHandle:
        """Call ``hook`` with every gradient that an evaluation has produced, before the algorithm uses it.

        A step that meets Inf or NaN, or is rolled back, may have shown some of its gradients already; whether it was
        taken is known in torch's ``register_step_post_hook``. Hooks belong to this instance, not to its state.

        Returns:
            A handle whose ``remove()`` takes the hook off.
        """
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer, for example for a head that has grown; rolls back a step in flight."""
        if self._is_linked:
            self.discard_step()
        super().add_param_group(param_group)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: torch's ``state`` and ``param_groups``, which are the base's, and ``wrapper``.

        Loads with ``weights_only=True``. Hooks that were registered on this optimizer see this dict, as in torch; those
        of the base see the base's.
        """
        self.discard_step()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.base.state_dict(), "wrapper": self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    def _own_state(self) -> dict[str, Any]:
        params = self.all_params()
        return {
            "version": VERSION,
            "class": type(self).__name__,
            "num_params": len(params),
            "task": [self.task_index, self.task_step],
            "telemetry": self.telemetry.as_dict(),
            "extra": self.extra_state(),
            "memories": {name: memory.state(params) for name, memory in self._memories.items() if memory},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; what does not fit raises ValueError and changes nothing."""
        self.discard_step()
        state_dict = state_dict.copy()  # shallow, as in torch: a hook may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if "wrapper" not in state_dict:
            raise ValueError(
                f"This is not a state of {type(self).__name__}: expected the keys 'state', 'param_groups' and "
                f"'wrapper', got {sorted(map(str, state_dict))}. Load a plain optimizer's state into optimizer.base."
            )
        wrapper = state_dict["wrapper"]
        own = {key: value for key, value in state_dict.items() if key != "wrapper"}
        reject_foreign_state(wrapper, self._own_state())
        reject_foreign_tensors(own, self.all_params())
        memories = load_memories(wrapper["memories"], self.all_params())
        saved, old_state, old_groups = self.extra_state(), self.base.state, self.base.param_groups
        try:
            self.load_extra_state(wrapper["extra"])
            self.base.load_state_dict(own)
        except BaseException:
            # Torch checks groups while it loads, and assigns new containers at the end: the old ones are still whole.
            self.load_extra_state(saved)
            self.base.state, self.base.param_groups = old_state, old_groups
            raise
        self.task_index, self.task_step = wrapper["task"]
        self.telemetry.load(wrapper["telemetry"])
        for name in {*self._memories, *memories}:
            self.memory(name).become(memories.get(name, DirectionMemory()))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        self.discard_step()
        # After the rollback no weak reference is left, which could not be pickled, and a copy begins at theta.
        return {**super().__getstate__(), "_gradient_hooks": OrderedDict()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rho={self._radius}, base={type(self.base).__name__})"

    @property
    def guarded_module(self) -> nn.Module | None:
        """The module whose buffers extra evaluations leave alone, if there is one."""
        return self._buffers.module

    # -- what `Passes` needs ------------------------------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that decide together, or None."""
        group, distributed = self.options.process_group, torch.distributed
        if not isinstance(group, str):
            return group
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return None
        return distributed.group.WORLD

    def _open(self, passes: Passes) -> Weights:
        """Register a step in flight, note the state to return to, and return the weights that it may move."""
        self.discard_step()  # another one may have begun since `passes()` was called
        self._has_just_looped = False
        self._in_flight = weakref.ref(passes)  # weak, so that a loop that is left early drops and undoes its step
        self._noted = {}
        self._saved_state = self.extra_state()
        group = self.process_group
        is_local = self.options.perturbation == "local" and group is not None
        return Weights(self.all_params(), group, self._move_scales(), is_local=is_local)

    def _move_scales(self) -> dict[Tensor, float]:
        """Return how far parameters move compared with `rho`, for those that do not simply follow it.

        A group may have a radius of its own, and where the base maximizes, the worst point lies down the gradient.
        """
        scales: dict[Tensor, float] = {}
        has_radii = self._radius is not None and "rho" not in self.defaults  # Adadelta has a rho of its own
        for group in self.param_groups:
            factor = 1.0
            if has_radii and "rho" in group:
                check("rho of a parameter group", group["rho"], at_least=0)
                # A schedule may have reached 0, where there is nothing to scale.
                factor = group["rho"] / self.rho if self.rho > 0 else 0.0
            if group["maximize"] if "maximize" in group else getattr(self.base, "maximize", False):
                factor = -factor
            if factor != 1.0:
                scales.update(dict.fromkeys(group["params"], factor))
        return scales

    def _rollback(self) -> None:
        for memory in self._memories.values():
            memory.undo()
        self.load_extra_state(self._saved_state)
        self._in_flight = None

    def _complete(self, num_evaluations: int, is_finite: bool) -> None:
        """Count a step that was taken, or skipped because it was not finite."""
        self._in_flight = None
        self._opt_called = True  # what LR schedulers look at; `passes` does not go through `step`
        self.telemetry.add_step(num_evaluations, {"rho": self.rho, **self._noted} if is_finite else None)
        if is_finite:
            self.task_step += 1
            for memory in self._memories.values():
                memory.commit()
            self.telemetry.cache_age = self.cache_age()
