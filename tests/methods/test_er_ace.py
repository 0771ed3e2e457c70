"""What is particular to ER-ACE: new images compete among the classes of their batch alone."""

from dataclasses import replace

import numpy as np
import torch

from cflat.data import Batch
from cflat.methods import Seen
from runs import tiny_method, tiny_stream


def in_second_task():
    stream = tiny_stream()
    method = tiny_method("er_ace", stream)
    for task in stream.tasks:
        method.grow(task)
    return method.eval()


def test_new_images_push_no_class_that_is_not_in_their_batch():
    method = in_second_task()
    labels = torch.tensor([3, 4, 3])
    batch = method.prepare(Batch(torch.rand(3, 3, 8, 8), labels, labels))
    method.loss(method.network, batch).total.backward()
    moved = method.network.head.weight.grad.abs().sum(dim=1) > 0
    assert moved.tolist() == [False, False, False, True, True, False]


def test_stored_images_compete_among_all_classes():
    method = in_second_task()
    labels = torch.tensor([3, 4, 3])
    stored = Batch(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 0]), labels)
    batch = method.prepare(replace(Batch(torch.rand(3, 3, 8, 8), labels, labels), replay=(stored,)))
    method.loss(method.network, batch).parts["replay"].backward()
    assert (method.network.head.weight.grad.abs().sum(dim=1) > 0).all()


def test_the_first_task_is_plain_training():
    stream = tiny_stream()
    method = tiny_method("er_ace", stream)
    method.grow(stream.tasks[0])
    labels = torch.tensor([0, 0, 1])
    batch = method.prepare(Batch(torch.rand(3, 3, 8, 8), labels, labels))
    method.eval().loss(method.network, batch).total.backward()
    assert (method.network.head.weight.grad.abs().sum(dim=1) > 0).all()


def test_steps_after_skipped_tasks_draw_from_the_memory_that_these_left():
    stream = tiny_stream()
    method = tiny_method("er_ace", stream)
    first, second = stream.tasks
    for task in stream.tasks:
        method.grow(task)
    method.skip_task(first)
    method.after_step(Seen(torch.from_numpy(second.train.rows), torch.from_numpy(second.train.labels)))
    (stored,) = method.replay(len(method.memory), np.random.default_rng(0))
    assert set(stored.images.labels) == set(range(6))
    assert stored.extras == {}
