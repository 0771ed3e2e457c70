"""What is particular to DER++: which logits are stored, and which of them are kept."""

from dataclasses import replace

import torch
from torch.nn import functional

from cflat.data import Batch
from cflat.methods.derpp import DERppConfig, squared_distance
from cflat.train import Observer
from runs import tiny_method, tiny_run, tiny_stream


def test_logits_of_classes_that_did_not_exist_then_are_free():
    logits = torch.randn(2, 4, requires_grad=True)
    stored, widths = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]), torch.tensor([2, 3])
    distance = squared_distance(logits, stored, widths)
    wanted = [functional.mse_loss(logits[i, :width], stored[i, :width]) for i, width in enumerate((2, 3))]
    torch.testing.assert_close(distance, torch.stack(wanted).mean())
    (gradient,) = torch.autograd.grad(distance, logits)
    assert gradient[0, 2:].tolist() == [0, 0]
    assert gradient[1, 3].item() == 0


class Batches(Observer):
    """Keeps what each step was prepared with, and the logits at its start."""

    def __init__(self):
        self.batches, self.logits = [], []

    def on_step_start(self, epoch, objective, batch):
        self.batches.append(batch)
        with torch.no_grad():
            self.logits.append(objective.method.loss(objective.model, batch).outputs["logits"])


def test_what_is_stored_are_the_logits_before_the_step_and_they_come_back_unchanged():
    stream = tiny_stream()
    method = tiny_method("derpp", stream, config=DERppConfig(memory_per_class=50))
    method.network.eval()
    method.set_train_mode = method.network.eval  # BatchNorm must give the observer what it gives the step
    seen = Batches()
    tiny_run(method, stream, epochs=1, optimizer="c_flat", observer=seen)
    stored = {}
    for batch, logits in zip(seen.batches, seen.logits, strict=True):
        for part in batch.replay[:1]:
            for row, kept, width in zip(
                part.rows.tolist(), part.extras["logits"], part.extras["logits_width"], strict=True
            ):
                torch.testing.assert_close(kept[:width], stored[row], rtol=1e-5, atol=1e-6)
        stored.update(zip(batch.rows.tolist(), logits, strict=True))
    assert not seen.batches[0].replay
    assert all(len(batch.replay) == 2 for batch in seen.batches[1:])
    widths = torch.cat([batch.replay[0].extras["logits_width"] for batch in seen.batches[-2:]])
    assert set(widths.tolist()) == {3, 6}


def test_the_loss_is_that_of_the_paper():
    stream = tiny_stream()
    method = tiny_method("derpp", stream, config=DERppConfig(alpha=0.3, beta=0.7))
    method.grow(stream.tasks[0])
    method.eval()
    labels = torch.tensor([0, 1, 2])
    stored = {"logits": torch.randn(3, 3), "logits_width": torch.tensor([3, 3, 3])}
    new, dark, labelled = (Batch(torch.rand(3, 3, 8, 8), labels, labels) for _ in range(3))
    batch = replace(new, replay=(dark.with_(**stored), labelled))
    network = method.network
    wanted = functional.cross_entropy(network(new.images), labels)
    wanted = wanted + 0.3 * functional.mse_loss(network(dark.images), stored["logits"])
    wanted = wanted + 0.7 * functional.cross_entropy(network(labelled.images), labels)
    torch.testing.assert_close(method.loss(network, batch).total, wanted)


class Poison(Observer):
    """Makes the logits of one step infinite."""

    def on_step_start(self, epoch, objective, batch):
        self.step = getattr(self, "step", -1) + 1
        if self.step == 1:
            batch.images.fill_(float("inf"))


def test_a_discarded_step_leaves_nothing_in_the_memory():
    stream = tiny_stream()
    method = tiny_method("derpp", stream, config=DERppConfig(memory_per_class=50))
    method.set_train_mode = method.network.eval  # BatchNorm would remember the infinite images
    result = tiny_run(method, stream, epochs=1, observer=Poison())
    assert result.cost.nonfinite_steps == 1
    assert method.memory.num_seen == result.cost.images - 16
    assert method.memory.state()["tensors"]["logits"].isfinite().all()
