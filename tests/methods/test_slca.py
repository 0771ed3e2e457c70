"""What is particular to SLCA: a slow backbone, frozen old outputs, and a head aligned by Gaussians."""

import torch
from torch.nn import functional

from cflat.methods import Phase
from cflat.methods._alignment import AlignmentConfig, ClassGaussians, align_head_, normalized_logits
from cflat.methods.slca import SLCAConfig, TaskHeads
from runs import tiny_method, tiny_run, tiny_stream

QUICK = SLCAConfig(align_epochs=1, align_samples=16, backbone_lr_scale=0.1)


def test_gaussians_have_the_mean_and_covariance_of_the_features():
    torch.manual_seed(0)
    features, labels = torch.randn(200, 4) @ torch.randn(4, 4), torch.arange(200) % 2
    gaussians = ClassGaussians(4)
    gaussians.grow(2)
    gaussians.fit(features, labels)
    for label in (0, 1):
        own = features[labels == label]
        torch.testing.assert_close(gaussians.means[label], own.mean(dim=0))
        covariance = gaussians.factors[label] @ gaussians.factors[label].T
        torch.testing.assert_close(covariance, torch.cov(own.T) + 1e-4 * torch.eye(4))
    drawn, of = gaussians.sample(20_000, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(drawn[of == 1].mean(dim=0), 0.5 * gaussians.means[1], rtol=0, atol=0.06)


def test_a_single_image_of_a_class_is_enough():
    gaussians = ClassGaussians(3)
    gaussians.grow(1)
    gaussians.fit(torch.ones(1, 3), torch.zeros(1, dtype=torch.long))
    assert gaussians.sample(2, torch.ones(1))[0].isfinite().all()


def test_alignment_makes_up_for_outputs_that_were_never_trained_together():
    """Two tasks whose heads are right by themselves, one ten times as loud: all images fall to it until aligned."""
    torch.manual_seed(0)
    means = 4 * torch.eye(4)
    labels = torch.arange(400) % 4
    features = means[labels] + torch.randn(400, 4)
    gaussians, heads = ClassGaussians(4), TaskHeads(4)
    gaussians.grow(4)
    gaussians.fit(features, labels)
    tasks = [range(2), range(2, 4)]
    for classes, scale in zip(tasks, (0.1, 1.0), strict=True):
        heads.add(2)
        with torch.no_grad():
            heads.newest.weight.copy_(scale * means[classes.start : classes.stop])
            heads.newest.bias.fill_(5 * scale)

    def accuracy():
        return (heads(features).argmax(dim=1) == labels).float().mean().item()

    assert accuracy() < 0.6
    align_head_(heads, gaussians, tasks, AlignmentConfig(align_epochs=10, align_lr=0.1))
    assert accuracy() > 0.9


def test_normalized_logits_are_those_of_the_source():
    logits, tasks = torch.randn(5, 5), [range(2), range(2, 5)]
    norms = torch.stack([logits[:, :2].norm(dim=1), logits[:, 2:].norm(dim=1)]).mean(dim=0)
    torch.testing.assert_close(normalized_logits(logits, tasks, 0.1), logits / norms[:, None] / 0.1)
    assert normalized_logits(logits, tasks, None) is logits


def test_later_tasks_go_on_from_the_head_before_the_alignment_and_never_touch_old_outputs():
    stream = tiny_stream()
    first = tiny_method("slca", stream, config=QUICK)
    tiny_run(first, stream.first(1), epochs=1)
    method = tiny_method("slca", stream, config=QUICK)
    tiny_run(method, stream, epochs=1)
    for one, other in zip(
        first.network.head.parts[0].parameters(), method.network.head.parts[0].parameters(), strict=True
    ):
        assert torch.equal(one, other)
    assert not torch.equal(method.aligned.parts[0].weight, method.network.head.parts[0].weight)


def test_the_backbone_learns_slowly():
    stream = tiny_stream()
    method = tiny_method("slca", stream, config=QUICK)
    method.grow(stream.tasks[0])
    groups = {group.name: group for group in method.param_groups(stream.tasks[0], Phase())}
    assert (groups["backbone"].lr_scale, groups["head"].lr_scale) == (0.1, 1.0)
    frozen = tiny_method("slca", stream, config=SLCAConfig(backbone_lr_scale=0))
    frozen.grow(stream.tasks[0])
    assert [group.name for group in frozen.param_groups(stream.tasks[0], Phase())] == ["head"]
    labels = torch.tensor([0, 2])
    from cflat.data import Batch

    batch = Batch(torch.rand(2, 3, 8, 8), labels, labels)
    method.eval()
    wanted = functional.cross_entropy(method.network(batch.images), labels)
    torch.testing.assert_close(method.loss(method.network, batch).total, wanted)
