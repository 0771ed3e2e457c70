"""The quadratic penalty that EWC and its kin share."""

import torch
from torch import nn

from cflat.nn import LinearHead, WeightAnchor


def weights_of(network):
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


def gradient_of(loss, network):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])


def test_one_pair_of_buffers_has_the_gradient_of_a_sum_of_penalties():
    torch.manual_seed(0)
    network, anchor, terms = nn.Linear(3, 2).double(), WeightAnchor(), []
    anchor.resize_(network)
    for _ in range(3):
        nn.init.normal_(network.weight)
        nn.init.normal_(network.bias)
        importance = {name: torch.rand_like(weight) for name, weight in network.named_parameters()}
        importance["bias"][0] = 0
        anchor.add_(network, importance)
        flat = torch.cat([part.flatten() for part in importance.values()])
        terms.append((flat, weights_of(network)))
    nn.init.normal_(network.weight)
    found = gradient_of(anchor(network), network)
    wanted = sum(2 * importance * (weights_of(network) - center) for importance, center in terms)
    torch.testing.assert_close(found, wanted)


def test_online_importance_decays_and_the_center_moves():
    network, anchor = nn.Linear(2, 1, bias=False), WeightAnchor()
    anchor.resize_(network)
    for value in (1.0, 3.0):
        nn.init.constant_(network.weight, value)
        anchor.replace_(network, {"weight": torch.ones(1, 2)}, decay=0.5)
    assert anchor.importance("weight").tolist() == [[1.5, 1.5]]
    assert anchor.center("weight").tolist() == [[3.0, 3.0]]
    nn.init.constant_(network.weight, 5.0)
    assert anchor(network).item() == 2 * 1.5 * 4


def test_rows_of_new_classes_are_free():
    head, anchor = LinearHead(3, 2), WeightAnchor()
    anchor.resize_(head)
    anchor.replace_(head, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    head.grow(2)
    anchor.resize_(head)
    with torch.no_grad():
        head.weight += 1
    (gradient,) = torch.autograd.grad(anchor(head), head.weight)
    assert torch.equal(gradient[2:], torch.zeros(2, 3))
    torch.testing.assert_close(gradient[:2], torch.full((2, 3), 2.0))
