"""Extra evaluations disturb neither the buffers of the model nor the stream of random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases import AWAY, OPTIMIZERS, case
from cflat import StepOptions
from faults import DOORS, EVERY, walk


class Tracker(nn.Module):
    """A custom layer that replaces one buffer, fills one lazily and counts in plain integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("first", None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0)
        self.first = inputs.detach()[0].clone() if self.first is None else self.first
        self.calls += 1
        return inputs


def _model(*, replacing: bool = True) -> nn.Module:
    torch.manual_seed(3)
    tracker: nn.Module = Tracker() if replacing else nn.Identity()
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), tracker, nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6, momentum=None), nn.Dropout(0.3),
        nn.Linear(6, 2),
    )  # fmt: skip


def _closure(model: nn.Module, step: int):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, generator=generator)

    def closure():
        loss = F.cross_entropy(model(inputs), torch.arange(8) % 2)
        loss.backward()
        return loss

    return closure


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_buffers_and_random_numbers_equal_plain_training(row):
    """At learning rate 0 each step's first evaluation is plain training's, so all that it leaves must be, too."""
    plain = _model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.0)
    torch.manual_seed(5)
    for step in range(7):
        reference.zero_grad()
        _closure(plain, step)()
        reference.step()
    random = torch.get_rng_state()

    model = _model()
    optimizer = row.make(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    torch.manual_seed(5)
    if row.name in AWAY:  # their only evaluation is not at theta: compare one step
        walk("step", optimizer, _closure(model, 0))
        assert all(int(buffer) == 1 for name, buffer in model.named_buffers() if name.endswith("tracked"))
        return
    for step in range(7):
        walk(DOORS[step % 3], optimizer, _closure(model, step))
    expected, found = _buffers(plain), _buffers(model)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_all_passes_of_a_step_see_the_same_masks(row):
    torch.manual_seed(1)
    dropout = nn.Dropout(0.5)
    weight = nn.Parameter(torch.ones(20))
    for replay in (True, False):
        optimizer = row.make(torch.optim.SGD([weight], lr=0.01), options=StepOptions(replay_rng=replay))
        for _ in range(5):
            masks = []
            for _ in optimizer.passes():
                mask = dropout(torch.ones(20))
                masks.append(mask)
                (mask * weight).square().sum().backward()
            is_shared = all(torch.equal(mask, masks[0]) for mask in masks)
            assert is_shared == (replay or len(masks) == 1)


def test_a_pass_that_draws_more_does_not_shift_the_stream():
    """Only the first evaluation counts, also if a later one takes another path through the model."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = case("c_flat").make(torch.optim.SGD([weight], lr=0.1))
    torch.manual_seed(2)
    torch.rand(4)
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    for index in optimizer.passes():
        torch.rand(4 + index)
        weight.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)


def test_guards_can_be_switched_off():
    model = _model()
    options = StepOptions(guard_buffers=False, replay_rng=False)
    optimizer = case("c_flat").make(torch.optim.SGD(model.parameters(), lr=0.0), model=model, options=options)
    optimizer.step(_closure(model, 0))
    assert int(model[1].num_batches_tracked) == 4


def test_without_a_model_buffers_are_not_guarded():
    model = _model()
    optimizer = case("c_flat").make(torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.step(_closure(model, 0))
    assert int(model[1].num_batches_tracked) == 4


def test_a_replaced_buffer_returns_as_the_same_tensor():
    """What a user holds a reference to must stay the module's buffer after the step's first evaluation."""
    model = _model()
    optimizer = case("sam").make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    held = []
    for index in optimizer.passes():
        _closure(model, 0)()
        if index == 0:
            held.append(model[2].mean)
    assert model[2].mean is held[0]
    assert int(model[2].calls) == 1


def test_a_lazy_buffer_is_empty_again_when_the_step_is_given_up():
    model = _model()
    optimizer = case("sam").make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: (_closure(model, 0)(), 1 / 0))
    assert model[2].first is None
    optimizer.step(_closure(model, 0))
    assert model[2].first is not None


@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_buffers_of_a_model_that_grows_are_guarded(row):
    model = _model(replacing=False)
    optimizer = row.make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    optimizer.step(_closure(model, 0))
    model.append(nn.BatchNorm1d(2))
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    for step in range(1, 4):
        optimizer.step(_closure(model, step))
        assert int(model[-1].num_batches_tracked) == step


class Odd(nn.Module):
    """Buffers that cannot be copied together with others, and one that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("expanded", torch.ones(1).expand(3))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.zeros(3))
        self.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        with torch.inference_mode():
            self.inferred += 1
        self.expanded = (self.expanded[:1] + 1).expand(3)
        return self.layer(inputs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("row", EVERY, ids=str)
def test_buffers_of_every_kind_are_guarded(row):
    model = Odd()
    optimizer = row.make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for step in range(1, 4):
        optimizer.step(_closure(model, step))
        assert (int(model.calls), model.inferred.tolist(), model.expanded.tolist()) == (
            step,
            [step] * 3,
            [step + 1] * 3,
        )
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: (_closure(model, 9)(), 1 / 0))
    assert (int(model.calls), model.inferred.tolist(), model.expanded.tolist()) == (3, [3] * 3, [4] * 3)
    assert model.nested.is_nested


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.norm(self.layer(inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("row", [case("none"), case("sam"), case("c_flat"), case("c_flat_turbo")], ids=str)
def test_scripted_modules_train_as_others_do(row):
    plain = Scripted()
    scripted = torch.jit.script(Scripted())
    scripted.load_state_dict(plain.state_dict())
    for model in (plain, scripted):
        optimizer = row.make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(4):
            optimizer.step(_closure(model, step))
    assert int(scripted.calls) == int(scripted.norm.num_batches_tracked) == 4
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(scripted.state_dict()[name], value)


@pytest.mark.parametrize("moment", ["first", "second"])
def test_an_interrupt_while_buffers_are_copied_restores_none_of_an_earlier_step(moment, monkeypatch):
    """Ctrl-C may come between noting the buffers and copying them."""
    model = _model()
    optimizer = case("sam").make(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    optimizer.step(_closure(model, 0))
    before = _buffers(model)
    copy, calls = torch._foreach_copy_, []

    def interrupted(targets, sources, *args):
        calls.append(1)
        if len(calls) == (1 if moment == "first" else 3):
            raise KeyboardInterrupt
        return copy(targets, sources, *args)

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(_closure(model, 1))
    monkeypatch.undo()
    after = _buffers(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
