"""What is particular to joint training: all images, and the same start for every task."""

import torch

from cflat.methods.joint import JointConfig
from runs import tiny_method, tiny_run, tiny_stream


def test_every_task_is_a_training_on_everything_from_the_same_start():
    """After two tasks the network is that of a run whose only task has all images."""
    stream = tiny_stream()
    method = tiny_method("joint", stream)
    start = {name: value.clone() for name, value in method.network.backbone.state_dict().items()}
    tiny_run(method, stream.first(1), epochs=1)
    method.grow(stream.tasks[1])
    assert sorted(method.train_images(stream.tasks[1]).rows) == sorted(stream.all_train.rows)
    rows = method.network.head.weight.detach().clone()
    method.start_task(stream.tasks[1], None)
    for name, value in method.network.backbone.state_dict().items():
        assert torch.equal(value, start[name]), name
    assert not torch.equal(method.network.head.weight, rows)


def test_a_warm_start_goes_on_from_the_last_task():
    stream = tiny_stream()
    method = tiny_method("joint", stream, config=JointConfig(start="warm"))
    tiny_run(method, stream.first(1), epochs=1)
    before = {name: value.clone() for name, value in method.network.backbone.state_dict().items()}
    method.grow(stream.tasks[1])
    method.start_task(stream.tasks[1], None)
    for name, value in method.network.backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
