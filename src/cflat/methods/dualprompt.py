"""DualPrompt: prefixes for all tasks and prefixes of one task, in a frozen ViT (Wang et al., 2022).

Task t trains the general prefixes, expert t and its key, with the cross-entropy among its own classes minus ``pull``
times the cosine between queries and key t. Test images take the expert whose key is nearest to their query.
"""

from __future__ import annotations

from torch import Tensor

from cflat._settings import CountOrZero, Flag, settings_class
from cflat.data import Task
from cflat.methods import Extract, StreamInfo, register_method
from cflat.methods._prompting import PromptConfig, PromptedViT, PromptMethod
from cflat.nn import Backbone, PrefixPrompts


@settings_class
class DualPromptConfig(PromptConfig):
    """Settings of DualPrompt; ``pool_size`` grows by itself when the stream has more tasks."""

    general_layers: tuple[CountOrZero, ...] = (0, 1)
    """Blocks that receive the prefix of all tasks."""
    expert_layers: tuple[CountOrZero, ...] = (2, 3, 4)
    """Blocks that receive the prefix of one task."""
    inherit_expert: Flag = True
    """Start each task's expert from the previous one; its key is always new."""
    untrained_experts: Flag = False
    """Let test images select experts of future tasks, as in PILOT."""
    legacy_layout: Flag = False
    """Reproduce the mixed-up expert keys and values of the public PyTorch ports; only to match batch-wise numbers."""


@register_method(
    "dualprompt",
    config=DualPromptConfig,
    summary="shared prefixes and one expert prefix per task, in a frozen ViT",
    scenarios=("class", "task", "domain"),
    families=("vit",),
    is_pretrained=True,
    is_batchwise=True,
    paper="DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning (2022)",
)
class DualPrompt(PromptMethod):
    """Prepend keys and values to the attention of some blocks and classify by the class token."""

    network: PromptedViT[PrefixPrompts]

    def __init__(self, config: DualPromptConfig, backbone: Backbone, info: StreamInfo) -> None:
        prefixes = PrefixPrompts(
            backbone,
            pool_size=config.pool_size,
            length=config.length,
            general_layers=config.general_layers,
            expert_layers=config.expert_layers,
            legacy_layout=config.legacy_layout,
        )
        super().__init__(PromptedViT(backbone, prefixes), config, info)
        self.config = config
        self.task_index = 0

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes, and an expert if the pool has none left."""
        super().grow(task)
        self.task_index = task.index
        # PILOT silently trains whichever expert the query selects when the pool has no more.
        if task.index == self.network.prompts.pool_size:
            self.network.prompts.add_experts(1)

    def start_task(self, task: Task, extract: Extract) -> None:
        """Start the task's expert from the previous one."""
        if self.config.inherit_expert and task.index > 0:
            self.network.prompts.copy_expert_(task.index - 1, task.index)

    def training_ids(self, query: Tensor) -> Tensor:
        """Return the task's expert for every image, (B,)."""
        return query.new_full((len(query),), self.task_index).long()

    def test_ids(self, query: Tensor, *, batchwise: bool) -> Tensor:
        """Return the expert with the nearest key, (B,), among those that have been trained."""
        num_trained = None if self.config.untrained_experts else self.task_index + 1
        return self.network.prompts.select(query, batchwise=batchwise, among=num_trained)
