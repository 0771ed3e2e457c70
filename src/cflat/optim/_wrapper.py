"""`Wrapper`: an optimizer around another, as torch, its schedulers and other people's trainers have to see it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class _OfBase:
    """An attribute that is the base's own; what torch's constructor sets before they are linked is dropped."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Wrapper | None, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.base, self._name)

    def __set__(self, optimizer: Wrapper, value: Any) -> None:
        if optimizer._is_linked:
            setattr(optimizer.base, self._name, value)


class Wrapper(Optimizer):
    """An optimizer whose parameter groups, state and defaults are those of ``base``, a plain torch optimizer."""

    # Descriptors instead of aliases: load_state_dict() assigns new containers, and a scheduler on the wrapper would
    # then change a list that the base no longer reads.
    param_groups = _OfBase()  # type: ignore[assignment]
    """The base optimizer's parameter groups."""
    state = _OfBase()  # type: ignore[assignment]
    """The base optimizer's state; what a wrapper keeps lives elsewhere."""
    defaults = _OfBase()  # type: ignore[assignment]
    """The base optimizer's defaults."""

    def __init__(self, base: Optimizer) -> None:
        if isinstance(base, type) or not isinstance(base, Optimizer):
            raise TypeError(
                f"base must be a torch optimizer, for example torch.optim.SGD(model.parameters(), lr=0.1), "
                f"got {base!r}."
            )
        if isinstance(base, Wrapper):
            raise TypeError(f"base must be a plain torch optimizer, got {type(base).__name__}, which wraps one.")
        try:
            # LBFGS cannot be a base: it evaluates the loss itself.
            inspect.signature(base.step).bind()
        except TypeError:
            name = type(base).__name__
            raise TypeError(f"base must be able to step without a closure, got {name}, which cannot.") from None
        self._is_linked = False
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self._is_linked = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer, for example for a head that has grown."""
        if self._is_linked:
            self.base.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.base.zero_grad(set_to_none)

    def all_params(self) -> list[Tensor]:
        """Return the parameters of all groups, in order."""
        return [param for group in self.param_groups for param in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler's patch of `step` and hooks belong to this instance, as with any torch optimizer.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Makes the hook dicts that `__getstate__` has left out, and patches `step` in a new process.
        super().__setstate__({})

    def __setattr__(self, name: str, value: Any) -> None:
        # The wrappers of Lightning and Fabric take on our class but hold the optimizer in `_optimizer`: state that our
        # methods set through them must not split off. LR schedulers patch `step` on the object that they are given.
        is_own = name in self.__dict__ or name == "step"
        object.__setattr__(self if is_own else self.__dict__.get("_optimizer", self), name, value)
