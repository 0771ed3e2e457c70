"""What is particular to EWC: the Fisher information, and a penalty that every evaluation sees."""

import pytest
import torch
from torch.nn import functional

from cflat.data import Batch
from cflat.methods.ewc import EWCConfig
from cflat.train.evaluate import Extractor
from runs import cpu, tiny_inputs, tiny_method, tiny_run, tiny_stream


def fisher_by_hand(method, task, kind):
    """The definition: a gradient for each image (and class), squared, averaged."""
    extract = Extractor(method, tiny_inputs().eval, 16, cpu())
    images = extract(task.train, lambda images: images)
    total = {name: torch.zeros_like(weight) for name, weight in method.network.named_parameters()}
    for image, label in zip(images, task.train.labels.tolist(), strict=True):
        logits = method.network(image[None])[:, task.classes.start :]
        log_chances = functional.log_softmax(logits, dim=1)[0]
        own = label - task.classes.start
        chances = log_chances.exp().tolist()
        rows = {"empirical": [(1.0, own)], "weighted": [(chances[own], own)]}.get(kind) or [
            (chance, c) for c, chance in enumerate(chances)
        ]
        for chance, row in rows:
            gradients = torch.autograd.grad(log_chances[row], list(method.network.parameters()), retain_graph=True)
            for name, gradient in zip(total, gradients, strict=True):
                total[name] += chance * gradient.square() / len(task.train)
    return total


@pytest.mark.parametrize("kind", ["empirical", "true", "weighted"])
def test_the_fisher_information_is_that_of_its_definition(kind):
    stream = tiny_stream()
    method = tiny_method("ewc", stream, config=EWCConfig(fisher=kind))
    tiny_run(method, stream.first(1), epochs=1)
    wanted = fisher_by_hand(method, stream.tasks[0], kind)
    for name, weight in method.network.named_parameters():
        torch.testing.assert_close(method.anchor.importance(name), wanted[name], rtol=1e-4, atol=1e-8)
        assert torch.equal(method.anchor.center(name), weight)


def test_the_penalty_is_part_of_the_loss_at_the_weights_of_the_moment():
    stream = tiny_stream()
    method = tiny_method("ewc", stream, config=EWCConfig(weight=10.0))
    tiny_run(method, stream.first(1), epochs=1)
    method.grow(stream.tasks[1])
    labels = torch.tensor([3, 4, 5])
    batch = Batch(torch.rand(3, 3, 8, 8), labels, labels)
    assert method.loss(method.network, batch).parts["penalty"].item() == 0
    weight = method.network.head.weight
    held = method.anchor.importance("head.weight").clone()
    with torch.no_grad():
        weight += 0.1
    penalty = method.loss(method.network, batch).parts["penalty"]
    torch.testing.assert_close(penalty, 10 / 2 * (held * 0.1**2).sum())
    assert held[:3].min() >= 0
    assert held[:3].sum() > 0
    assert held[3:].sum() == 0  # the rows of the new classes


def test_a_bound_on_the_fisher_information_holds_for_each_task():
    stream = tiny_stream()
    method = tiny_method("ewc", stream, config=EWCConfig(fisher_max=1e-5, fisher_batch=8))
    tiny_run(method, stream, epochs=1)
    assert float(method.anchor.importance("head.weight").max()) <= 2.001e-5
    with pytest.raises(ValueError, match="fisher_batch=1"):
        EWCConfig(fisher="true", fisher_batch=8)
