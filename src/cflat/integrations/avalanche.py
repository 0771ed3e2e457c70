"""Avalanche: a plugin that gives every supervised strategy steps of several evaluations, and starts its tasks."""

from __future__ import annotations

from typing import Any

from avalanche.core import SupervisedPlugin

from cflat.integrations._micro_batches import MicroBatches, flat_optimizer


class FlatPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Add to a strategy's plugins, with an optimizer of cflat as the strategy's optimizer.

    The strategy's own forward and backward are the first evaluation. For each further one, forward, criterion,
    ``before_backward`` and ``after_backward`` of all other plugins (the penalties of EWC and LwF, say) run again.
    Metrics see the first evaluation alone.

    Args:
        num_tasks: Length of the stream, if it is known.
    """

    def __init__(self, num_tasks: int | None = None) -> None:
        super().__init__()
        self.num_tasks = num_tasks

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Start the task, once the strategy has adapted model and optimizer to it."""
        self.optimizer = flat_optimizer(strategy.optimizer, "Wrap the torch optimizer of the strategy.")
        self.optimizer.start_task(strategy.experience.current_experience, self.num_tasks)

        self._kept = MicroBatches(self.optimizer)

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Remember how the mini-batch that the strategy is about to evaluate can be evaluated again."""
        self._kept.clear()
        self._kept.keep(self._evaluate, strategy, kwargs)

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Take the step; the strategy's own ``optimizer.step()`` then does nothing."""
        first = strategy.loss, strategy.mb_output
        try:
            with self.optimizer.passes(accumulated=True) as passes:
                for index in passes:
                    if passes.replays:
                        self._kept.replay(index)
        finally:
            self._kept.clear()
        # Metrics read both after the update, and are those of the first evaluation.
        strategy.loss, strategy.mb_output = first

    def _evaluate(self, strategy: Any, kwargs: dict[str, Any]) -> None:
        """Do once more what `training_epoch` does for a mini-batch, as far as it makes the gradient."""
        others = [plugin for plugin in strategy.plugins if plugin not in (self, strategy.evaluator)]

        def trigger(event: str) -> None:
            for plugin in others:
                getattr(plugin, event, lambda *_, **__: None)(strategy, **kwargs)  # it may not know the event

        strategy.loss = strategy._make_empty_loss()
        trigger("before_forward")
        strategy.mb_output = strategy.forward()
        trigger("after_forward")
        strategy.loss += strategy.criterion()
        trigger("before_backward")
        strategy.backward()
        trigger("after_backward")
