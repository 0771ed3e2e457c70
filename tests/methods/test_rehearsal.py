"""What is particular to iCaRL, MEMO and their exemplars."""

import pytest
import torch
from torch.nn import functional

from cflat.methods import StreamInfo, create_method, get_method_spec
from cflat.methods.icarl import distillation
from cflat.methods.memo import MEMOConfig, align_weights_
from cflat.nn.backbone import create_backbone
from cflat.nn.heads import LinearHead
from runs import tiny_method, tiny_run, tiny_stream


def test_distillation_is_a_soft_cross_entropy_with_no_gradient_at_the_teacher():
    teacher = torch.randn(5, 4, dtype=torch.float64)
    logits = torch.cat([teacher, torch.randn(5, 2, dtype=torch.float64)], dim=1).requires_grad_()
    loss = distillation(logits, teacher, temperature=2.0)
    expected = -((teacher / 2).softmax(1) * (logits[:, :4] / 2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad.abs().max() < 1e-12


def test_the_teacher_is_the_network_before_the_task():
    stream = tiny_stream()
    method = tiny_method("icarl", stream)
    method.grow(stream.tasks[0])
    images = torch.rand(4, 3, 8, 8)
    method.eval()
    before = method.network(images)
    method.grow(stream.tasks[1])
    method.eval()
    torch.testing.assert_close(method.teacher(images), before)
    assert method.network(images).shape[1] == 6
    assert not any(p.requires_grad for p in method.teacher.parameters())


@pytest.mark.parametrize("name", ["replay", "icarl", "memo"])
@pytest.mark.parametrize("budget", [{"memory_total": 20}, {"memory_per_class": 3}, {"memory_per_class": 500}])
def test_memory_stays_within_its_budget(name, budget):
    stream = tiny_stream()
    method = tiny_method(name, stream, config=get_method_spec(name).config(**budget))
    tiny_run(method, stream, epochs=1)
    assert set(method.memory.images().labels) == set(range(6))
    assert len(method.memory) <= budget.get("memory_total", 6 * min(budget.get("memory_per_class", 0), 12))


def test_memo_grows_a_stage_per_task_and_keeps_old_weights():
    stream = tiny_stream()
    method = tiny_method("memo", stream)
    method.grow(stream.tasks[0])
    weight = method.network.head.weight.detach().clone()
    dim = method.network.stage_dim
    method.grow(stream.tasks[1])
    network = method.network
    assert len(network.stages) == 2
    assert network.head.weight.shape == (6, 2 * dim)
    assert torch.equal(network.head.weight[:3, :dim], weight)
    assert network.auxiliary.num_classes == 4
    assert not any(p.requires_grad for p in network.stages[0].parameters())
    for old, new in zip(network.stages[0].parameters(), network.stages[1].parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.requires_grad


def test_memos_auxiliary_targets_name_every_old_class_zero():
    stream = tiny_stream()
    method = tiny_method("memo", stream)
    for task in stream.tasks:
        method.grow(task)
    method.eval()
    from cflat.data import Batch

    labels = torch.tensor([0, 2, 3, 5])
    images = torch.rand(4, 3, 8, 8)
    parts = method.loss(method.network, Batch(images, labels, labels)).parts
    logits, auxiliary = method.network(images)
    torch.testing.assert_close(parts["classify"], functional.cross_entropy(logits, labels))
    torch.testing.assert_close(parts["auxiliary"], functional.cross_entropy(auxiliary, torch.tensor([0, 0, 1, 3])))


def test_alignment_equalises_mean_row_norms():
    head = LinearHead(6, 4)
    head.grow(3)
    with torch.no_grad():
        head.weight[4:] *= 7
    old = head.weight[:4].detach().clone()
    align_weights_(head, 4)
    norms = head.weight.norm(dim=1)
    torch.testing.assert_close(norms[:4].mean(), norms[4:].mean())
    assert torch.equal(head.weight[:4], old)


def test_a_random_specialised_stage_of_a_vit_is_its_last_block_alone():
    backbone = create_backbone("vit_smoke", image_size=8)
    with torch.no_grad():
        backbone.model.norm.weight.fill_(3.0)
    stream = tiny_stream()
    info = StreamInfo("class", stream.num_classes)
    stages = [
        create_method("memo", backbone, info, MEMOConfig(specialised_init=kind)).network.stages[0]
        for kind in ("backbone", "random")
    ]
    own, anew = (dict(stage.named_parameters()) for stage in stages)
    changed = {name for name in own if not torch.equal(own[name], anew[name])}
    assert any(name.startswith("0.attn") for name in changed)
    assert any(name.startswith("0.mlp") for name in changed)
    assert not [name for name in changed if not name.startswith("0.")]  # the final norm keeps its weights
    assert torch.equal(anew["1.weight"], torch.full((64,), 3.0))
