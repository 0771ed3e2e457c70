"""What is particular to LwF: whose outputs it keeps, and how the two weightings differ."""

import torch
from torch.nn import functional

from cflat.data import Batch
from cflat.methods.lwf import LwFConfig
from methods.streams import domain_stream
from runs import tiny_method, tiny_run, tiny_stream


def in_third_task(weighting):
    stream = tiny_stream(num_tasks=4)
    method = tiny_method("lwf", stream, config=LwFConfig(weighting=weighting))
    for task in stream.tasks[:3]:
        method.grow(task)
    method.eval()
    labels = torch.tensor([6, 7, 8])
    batch = method.prepare(Batch(torch.rand(3, 3, 8, 8), labels, labels))
    with torch.no_grad():
        method.network.head.weight += torch.randn_like(method.network.head.weight)
    return method, batch


def soft(logits, teacher):
    return -((teacher / 2).softmax(1) * (logits / 2).log_softmax(1)).sum(1).mean()


def test_both_weightings_are_those_of_their_sources():
    for weighting, weight, heads in (("toolbox", 3.0, [(0, 6)]), ("paper", 1.0, [(0, 3), (3, 6)])):
        method, batch = in_third_task(weighting)
        logits, teacher = method.network(batch.images), batch.extras["teacher"]
        parts = method.loss(method.network, batch).parts
        torch.testing.assert_close(parts["classify"], functional.cross_entropy(logits[:, 6:9], batch.labels - 6))
        wanted = weight * sum(soft(logits[:, a:b], teacher[:, a:b]) for a, b in heads)
        torch.testing.assert_close(parts["distil"], wanted)


def test_domains_share_one_head_that_is_kept():
    stream = domain_stream()
    method = tiny_method("lwf", stream, config=LwFConfig(weighting="paper"))
    tiny_run(method, stream, epochs=1)
    assert method.old == [range(6)]
