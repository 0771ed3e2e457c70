"""What is particular to CODA-Prompt: a mixture over all components, of which only the newest move."""

import pytest
import torch

from cflat.methods.coda_prompt import CODAPromptConfig
from cflat.nn import PromptComponents, create_backbone
from cflat.nn.components import orthonormal
from cflat.train import BaseSettings
from runs import tiny_method, tiny_run, tiny_stream

CONFIG = CODAPromptConfig(components=3, length=4, layers=(0, 1))


def test_the_mixture_is_that_of_the_paper():
    torch.manual_seed(0)
    components = PromptComponents(create_backbone("vit_smoke", image_size=8), length=4, layers=(1,))
    components.grow(2)
    components.grow(3)
    query = torch.randn(6, components.dim)
    prompts, keys, attention = (
        torch.cat([part[0] for part in parts]) for parts in (components.prompts, components.keys, components.attention)
    )
    for row, (key, value) in zip(query, zip(*components.prefixes(query)[1], strict=True), strict=True):
        weights = [torch.cosine_similarity(row * a, k, dim=0) for a, k in zip(attention, keys, strict=True)]
        wanted = sum(weight * prompt for weight, prompt in zip(weights, prompts, strict=True))
        torch.testing.assert_close(key.transpose(0, 1).flatten(1), wanted[:2])
        torch.testing.assert_close(value.transpose(0, 1).flatten(1), wanted[2:])


def test_new_components_are_orthogonal_to_all_others():
    components = PromptComponents(create_backbone("vit_smoke", image_size=8), length=4, layers=(0, 1))
    for _ in range(3):
        components.grow(4)
    assert components.orthogonality().item() < 1e-10
    assert orthonormal(3, 2).norm(dim=1).tolist() == pytest.approx([1, 1, 1])  # no room: unit rows


@pytest.mark.parametrize("optimizer", ["none", "c_flat"])
def test_components_of_earlier_tasks_stay_as_they_were(optimizer):
    stream = tiny_stream()
    method = tiny_method("coda_prompt", stream, config=CONFIG)
    base = BaseSettings(name="adam", lr=0.01, weight_decay=0.1)
    tiny_run(method, stream.first(1), epochs=1, base=base)
    first = [part[0].detach().clone() for part in (method.network.components.keys, method.network.components.prompts)]
    whole = tiny_method("coda_prompt", stream, config=CONFIG)
    tiny_run(whole, stream, epochs=1, base=base)
    now = [part[0] for part in (whole.network.components.keys, whole.network.components.prompts)]
    assert all(torch.equal(one, other) for one, other in zip(first, now, strict=True))
    trained = {name for name, weight in whole.network.named_parameters() if weight.requires_grad}
    kinds = ("prompts", "keys", "attention")
    assert trained == {"head.weight", "head.bias", *(f"components.{kind}.1" for kind in kinds)}


def test_wrong_shapes_are_rejected():
    backbone = create_backbone("vit_smoke", image_size=8)
    with pytest.raises(ValueError, match="even"):
        PromptComponents(backbone, length=3)
    with pytest.raises(ValueError, match="different blocks"):
        PromptComponents(backbone, layers=(0, 99))
