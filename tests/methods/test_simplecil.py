"""SimpleCIL is the nearest class mean by cosine, and nothing else."""

import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader
from methods.streams import domain_stream, stream_of, uneven_stream, whole_task
from runs import tiny_inputs, tiny_method, tiny_run


def images_of(images):
    return next(iter(BatchLoader(images, tiny_inputs().eval, len(images), shuffle=False)))


@torch.no_grad()
def test_scores_are_cosines_with_class_means():
    stream = uneven_stream()
    method = tiny_method("simplecil", stream)
    tiny_run(method, stream)
    train, test = (images_of(getattr(whole_task(), part)) for part in ("train", "test"))
    features = method.network(train.images)
    means = torch.stack([features[train.labels == label].mean(0) for label in range(6)])
    expected = functional.cosine_similarity(method.network(test.images)[:, None], means[None], dim=-1)
    torch.testing.assert_close(method.predict(test)["logits"], expected)


def test_nothing_is_trained():
    stream = uneven_stream()
    method = tiny_method("simplecil", stream)
    before = {key: value.clone() for key, value in method.network.state_dict().items()}
    result = tiny_run(method, stream, optimizer="c_flat")
    assert result.cost.steps == result.cost.evaluations == 0
    assert all(torch.equal(value, before[key]) for key, value in method.network.state_dict().items())


def test_domains_share_one_mean_per_class():
    stream = domain_stream()
    parts, whole = (tiny_method("simplecil", stream) for _ in range(2))
    tiny_run(parts, stream)
    tiny_run(whole, stream_of(whole_task(), scenario="domain"))
    assert parts.means.num_classes == 6
    torch.testing.assert_close(parts.means.means, whole.means.means)


@pytest.mark.parametrize("name", ["simplecil", "aper", "ranpac", "ease"])
@torch.no_grad()
def test_half_precision_networks_are_classified_in_full_precision(name):
    """Cosines of near classes, and the solution along small eigenvalues, are lost in bfloat16."""
    stream = uneven_stream()
    method = tiny_method(name, stream)
    with torch.enable_grad():
        tiny_run(method, stream, epochs=1)
    test = images_of(whole_task().test)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = method.predict(test)["logits"]
    assert scores.dtype == torch.float32
    assert len(scores.unique()) > 0.9 * scores.numel()  # a handful of values if anything was rounded on the way
