"""DualPrompt: sizes, attention with prefixes against a naive one, and whose expert is used when."""

import pytest
import torch

from cflat.methods import StreamInfo, create_method
from cflat.methods.dualprompt import DualPromptConfig
from cflat.nn.backbone import create_backbone
from cflat.nn.vit import vit_of
from cflat.train import BaseSettings
from runs import tiny_method, tiny_run, tiny_stream


def naive_features(network, images, expert):
    """Prefixed attention of one image, head by head, straight from the definition."""
    vit, prompts = vit_of(network.backbone), network.prompts
    tokens = vit.pos_drop(torch.cat([vit.cls_token, vit.patch_embed(images)], dim=1) + vit.pos_embed)
    for index, block in enumerate(vit.blocks):
        normed = block.norm1(tokens)[0]
        query, key, value = block.attn.qkv(normed).chunk(3, dim=1)
        outputs = []
        for head, part in enumerate(torch.arange(64).chunk(4)):
            keys, values = key[:, part], value[:, part]
            if index in (0, 1):
                pair = prompts.general[index]
            elif index in (2, 3, 4):
                pair = prompts.experts[index - 2, :, expert]
            else:
                pair = None
            if pair is not None:
                keys, values = torch.cat([pair[0, :, head], keys]), torch.cat([pair[1, :, head], values])
            weights = (query[:, part] @ keys.T / 4).softmax(dim=1)  # 4 = sqrt(head_dim)
            outputs.append(weights @ values)
        tokens = tokens + block.attn.proj(torch.cat(outputs, dim=1))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return vit.norm(tokens)[:, 0]


def test_parameter_count_on_vit_base():
    with torch.device("meta"):
        method = create_method("dualprompt", create_backbone("vit_base"), StreamInfo("class", 100))
        method.network.head.grow(100)
    (group,) = method.param_groups(None, None)
    assert sum(p.numel() for p in group.params) == 253_440 + 769 * 100


def test_prefixes_agree_with_a_naive_attention():
    network = tiny_method("dualprompt", tiny_stream()).network.eval()
    images, ids = torch.rand(3, 3, 8, 8), torch.tensor([4, 0, 7])
    with torch.no_grad():
        found = network.features(network.tokens(images), ids)
        naive = [naive_features(network, image[None], expert) for image, expert in zip(images, ids, strict=True)]
    torch.testing.assert_close(found, torch.cat(naive), rtol=1e-4, atol=1e-5)


def test_the_legacy_layout_is_another_network():
    stream = tiny_stream()
    right, legacy = (
        tiny_method("dualprompt", stream, config=DualPromptConfig(legacy_layout=on)) for on in (False, True)
    )
    legacy.network.load_state_dict(right.network.state_dict())
    tokens, ids = right.network.tokens(torch.rand(2, 3, 8, 8)), torch.tensor([1, 1])
    assert not torch.allclose(right.network.features(tokens, ids), legacy.network.features(tokens, ids), atol=1e-3)


def test_later_prompts_leave_more_to_compute_once():
    config = DualPromptConfig(general_layers=(), expert_layers=(3, 4))
    network = tiny_method("dualprompt", tiny_stream(), config=config).network.eval()
    images = torch.rand(2, 3, 8, 8)
    tokens = network.tokens(images)
    vit = vit_of(network.backbone)
    torch.testing.assert_close(tokens, vit.blocks[:3](vit._pos_embed(vit.patch_embed(images))))
    torch.testing.assert_close(network.query(tokens), network.backbone(images))
    assert tokens.grad_fn is None


def test_each_task_trains_its_expert_and_key_alone():
    stream = tiny_stream()
    method = tiny_method("dualprompt", stream)
    prompts = method.network.prompts
    experts, keys = prompts.experts.detach().clone(), prompts.keys.detach().clone()
    tiny_run(method, stream, epochs=1, base=BaseSettings(lr=0.05))  # weight decay would reach every expert
    changed = (prompts.experts != experts).flatten(3).any(3).all(0).all(0)
    assert changed.tolist() == [True, True] + 8 * [False]
    assert (prompts.keys != keys).any(1).tolist() == [True, True] + 8 * [False]


@pytest.mark.parametrize("inherits", [True, False])
def test_an_expert_starts_from_the_previous_one(inherits):
    stream = tiny_stream()
    method = tiny_method("dualprompt", stream, config=DualPromptConfig(inherit_expert=inherits, pool_size=1))
    for task in stream.tasks:
        method.grow(task)
        method.start_task(task, None)
    experts, keys = method.network.prompts.experts, method.network.prompts.keys
    assert experts.shape[2] == len(keys) == 2
    assert torch.equal(experts[:, :, 1], experts[:, :, 0]) == inherits
    assert not torch.equal(keys[1], keys[0])


def test_test_images_choose_among_trained_experts():
    stream = tiny_stream()
    method, pilot = (
        tiny_method("dualprompt", stream, config=DualPromptConfig(untrained_experts=on)) for on in (False, True)
    )
    query = method.network.prompts.keys[[1, 7, 0, 9]].detach()
    pilot.network.load_state_dict(method.network.state_dict())
    for one in (method, pilot):
        one.grow(stream.tasks[0])
        one.grow(stream.tasks[1])
    assert pilot.test_ids(query, batchwise=False).tolist() == [1, 7, 0, 9]
    ids = method.test_ids(query, batchwise=False)
    assert ids[[0, 2]].tolist() == [1, 0]
    assert (ids < 2).all()
