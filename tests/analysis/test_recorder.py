"""The recorder against a naive computation of the paper's vectors, and its promise to change nothing."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cflat
from cflat.analysis.recorder import MAX_RATIOS, RATIO_EDGES, GradientRecorder, derived_vectors, ratio_histogram
from cflat.analysis.shadow import Shadow

RHO, RHO_FD = 0.1, 0.05


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(16, 5, generator=generator, dtype=dtype), torch.randint(0, 3, (16,), generator=generator)


def closure_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float64):
    x, y = batch_of(step, dtype)

    def closure() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def naive(model: nn.Module, step: int) -> dict[str, Tensor]:
    """g, g_s, g_0, g_1 and the losses, from a copy of the model, straight from the definitions."""
    x, y = batch_of(step)

    def at(offset: Tensor | float) -> tuple[Tensor, Tensor]:
        probe = copy.deepcopy(model)
        theta = nn.utils.parameters_to_vector(probe.parameters()).detach()
        nn.utils.vector_to_parameters(theta + offset, probe.parameters())
        loss = F.cross_entropy(probe(x), y)
        loss.backward()
        return torch.cat([p.grad.reshape(-1) for p in probe.parameters()]), loss.detach()

    g, loss = at(0.0)
    g_s, loss_s = at(RHO * g / g.norm())
    eps_1 = RHO * (g_s - g) / (g_s - g).norm()
    g_0, _ = at(eps_1)
    g_1, _ = at(eps_1 + RHO_FD * g_0 / g_0.norm())
    g_f = RHO / RHO_FD * (g_1 - g_0)
    return {
        "loss": loss,
        "sharpness": loss_s - loss,
        "g": g,
        "g_s": g_s,
        "g_s - g": g_s - g,
        "g_0": g_0,
        "g_f": g_f,
        "g_vs": g_s - torch.dot(g_s, g) / torch.dot(g, g) * g,
        "g_vf": g_f - torch.dot(g_f, g_0) / torch.dot(g_0, g_0) * g_0,
    }


def make_c_flat(model: nn.Module) -> cflat.CFlat:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return cflat.CFlat(base, model=model, rho=RHO, rho_fd=RHO_FD, lam=0.2)


def test_numbers_are_those_of_the_definitions():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=2, lag=4)
    recorder.attach(optimizer)
    expected = []
    for step in range(12):
        if (step + 1) % 2 == 0:
            expected.append(naive(model, step))
        optimizer.step(closure_of(model, step))
    assert [record.step for record in recorder.records] == [1, 3, 5, 7, 9, 11]
    for index, (record, want) in enumerate(zip(recorder.records, expected, strict=True)):
        assert record.loss == pytest.approx(float(want["loss"]), rel=1e-12)
        assert record.sharpness == pytest.approx(float(want["sharpness"]), rel=1e-9)
        assert record.flatness == pytest.approx(RHO * float(want["g_0"].norm()), rel=1e-9)
        for name, norm in record.norms.items():
            assert norm == pytest.approx(float(want[name].norm()), rel=1e-8), name
        assert record.cosines["g_f, g_s"] == pytest.approx(float(F.cosine_similarity(want["g_f"], want["g_s"], dim=0)))
        if index < 2:
            assert not record.distances
            continue
        earlier = expected[index - 2]
        assert set(record.distances) == {"g", "g_s - g", "g_0", "g_f", "g_vs", "g_vf"}
        for name, distance in record.distances.items():
            assert distance == pytest.approx(float((want[name] - earlier[name]).norm()), rel=1e-7), name
            cosine = float(F.cosine_similarity(want[name], earlier[name], dim=0))
            assert record.turns[name] == pytest.approx(cosine, abs=1e-8), name


def test_ratio_histogram_counts_every_corrected_coordinate():
    m, n = torch.tensor([1.0, -2.0, 0.0, 1e-9, 5.0]), torch.tensor([1.0, 1.0, 3.0, 1.0, 0.0])
    counts = ratio_histogram(m, n)
    assert int(counts.sum()) == 4  # the coordinate without a correction is left out
    assert counts[-1] == 1  # 5 / 1e-12 lies beyond the last edge
    assert counts[0] == 1  # log 1e-9 = -20.7 lies before the first
    place = int(torch.bucketize(torch.tensor(0.0), RATIO_EDGES, right=True)) - 1
    assert counts[place] == 1  # log |1 / 1|


def test_ratios_of_a_large_model_are_counted_in_a_sample_of_the_same_shape():
    generator = torch.Generator().manual_seed(0)
    m, n = torch.randn(2, 3 * MAX_RATIOS, generator=generator)
    sample = ratio_histogram(m, n)
    assert int(sample.sum()) == MAX_RATIOS
    whole = sum(ratio_histogram(*pair) for pair in zip(m.chunk(3), n.chunk(3), strict=True))
    assert float((sample / sample.sum() - whole / whole.sum()).abs().max()) < 1e-3


@pytest.mark.parametrize("name", ["c_flat", "c_flat_turbo", "sam", "none"])
def test_recording_changes_no_bit_of_the_training(name: str):
    weights = []
    for is_recorded in (False, True):
        model = make_model(torch.float32)
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = cflat.create_optimizer(name, base, model=model)
        optimizer.start_task(0, 2)
        if is_recorded:
            GradientRecorder(every=1, lag=1).attach(optimizer)
        for step in range(12):
            optimizer.step(closure_of(model, step, torch.float32))
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_turbo_is_recorded_as_far_as_it_computes():
    model = make_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cflat.CFlatTurbo(base, model=model, rho=RHO, k=4, trigger=False, schedule=False)
    recorder = GradientRecorder(every=1, lag=1)
    recorder.attach(optimizer)
    for step in range(8):
        optimizer.step(closure_of(model, step))
    has_exact = ["g_vf" in record.norms for record in recorder.records]
    assert has_exact == [True, False, False, True, False, False, False, True]  # empty cache, then j mod 4 = 0
    assert all({"g", "g_0"} <= set(record.norms) for record in recorder.records)


def test_detached_recorder_sees_nothing_more():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=1, lag=1)
    detach = recorder.attach(optimizer)
    optimizer.step(closure_of(model, 0))
    detach()
    optimizer.step(closure_of(model, 1))
    assert len(recorder.records) == 1
    assert not optimizer._gradient_hooks


def test_steps_that_were_not_taken_are_not_recorded():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=1, lag=1)
    recorder.attach(optimizer)
    calls = iter(range(100))

    def explodes_in_third() -> Tensor:
        loss = closure_of(model, 0)()
        return loss if next(calls) != 2 else _spoil(model, loss)

    optimizer.step(explodes_in_third)
    assert optimizer.telemetry.nonfinite == 1
    assert recorder.records == []
    with pytest.raises(RuntimeError, match="stop"):
        optimizer.step(_raise)
    optimizer.step(closure_of(model, 1))
    assert len(recorder.records) == 1


def test_gradients_of_a_discarded_step_are_not_taken_for_those_of_the_next():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=2, lag=2)
    recorder.attach(optimizer)
    optimizer.step(closure_of(model, 0))
    calls = iter(range(100))
    with pytest.raises(RuntimeError, match="stop"):  # in the second evaluation of a step that is to be recorded
        optimizer.step(lambda: closure_of(model, 1)() if next(calls) == 0 else _raise())
    optimizer.start_task(1)
    optimizer.step(closure_of(model, 2))
    assert recorder.records == []
    optimizer.step(closure_of(model, 3))
    assert [(record.task, record.step) for record in recorder.records] == [(1, 1)]


@pytest.mark.parametrize("returned", [lambda loss: (loss, [loss]), lambda loss: torch.stack([loss, loss]), str])
def test_a_closure_that_returns_no_number_is_recorded_without_a_loss(returned):
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=1, lag=1)
    recorder.attach(optimizer)
    optimizer.step(lambda: returned(closure_of(model, 0)().detach()))
    assert optimizer.telemetry.steps == 1
    assert [(record.loss, record.sharpness) for record in recorder.records] == [(None, None)]
    assert recorder.records[0].norms["g_f"] > 0


def _spoil(model: nn.Module, loss: Tensor) -> Tensor:
    next(model.parameters()).grad.fill_(float("inf"))
    return loss


def _raise() -> Tensor:
    raise RuntimeError("stop")


def test_memory_is_bounded_by_records_and_coordinates():
    model = make_model()
    optimizer = make_c_flat(model)
    recorder = GradientRecorder(every=1, lag=3, max_coordinates=20, max_records=10)
    recorder.attach(optimizer)
    exact = GradientRecorder(every=1, lag=3)
    exact.attach(optimizer)
    for step in range(25):
        optimizer.step(closure_of(model, step))
    assert len(recorder.records) <= 10
    assert all(len(vector) == 20 for past in recorder._earlier for vector in past.values())
    assert len(recorder._earlier) == 3
    shown = {record.step: record.norms["g"] for record in exact.records}
    ratios = [record.norms["g"] / shown[record.step] for record in recorder.records]
    assert 0.6 < sum(ratios) / len(ratios) < 1.6  # 20 of 66 coordinates, scaled up


def test_a_new_task_and_a_grown_model_start_comparisons_afresh():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=1, lag=1)
    recorder.attach(optimizer)
    optimizer.step(closure_of(model, 0))
    optimizer.step(closure_of(model, 1))
    optimizer.start_task(1)
    optimizer.step(closure_of(model, 2))
    next(model.parameters()).requires_grad_(False)
    optimizer.step(closure_of(model, 3))
    assert [bool(record.distances) for record in recorder.records] == [False, True, False, False]
    assert [record.task for record in recorder.records] == [0, 0, 1, 1]


def test_history_is_json_and_reads_back():
    model = make_model()
    optimizer, recorder = make_c_flat(model), GradientRecorder(every=1, lag=1)
    recorder.attach(optimizer)
    for step in range(3):
        recorder.epoch = step
        optimizer.step(closure_of(model, step))
    text = json.dumps(recorder.to_dict(), allow_nan=False)
    again = GradientRecorder(every=1, lag=1)
    again.load(json.loads(text))
    assert again.to_dict() == recorder.to_dict()
    assert {entry["epoch"] for entry in again.to_dict()["ratios"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"every": 0}, "every"), ({"every": 2, "lag": 5}, "multiple of every"), ({"lag": 0}, "lag")],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        GradientRecorder(**arguments)


def test_derived_components_are_orthogonal_to_their_references():
    generator = torch.Generator().manual_seed(0)
    seen = {name: torch.randn(50, generator=generator, dtype=torch.float64) for name in ("g", "g_s", "g_0", "g_1")}
    vectors = derived_vectors(seen, rho=0.1)
    assert abs(float(torch.dot(vectors["g_vs"], seen["g"]))) < 1e-12
    assert abs(float(torch.dot(vectors["g_vf"], seen["g_0"]))) < 1e-12
    want = seen["g_s"] - torch.dot(seen["g_s"], seen["g"]) / torch.dot(seen["g"], seen["g"]) * seen["g"]
    torch.testing.assert_close(vectors["g_vs"], want)


def test_shadow_leaves_no_trace_and_returns_the_direction():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    shadow = Shadow("c_flat", model.parameters(), model, rho=RHO)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    direction = shadow.look(closure_of(model, 0))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((parameter.grad == 7.0).all()) for parameter in model.parameters())
    lr = 1.0
    real = cflat.CFlat(torch.optim.SGD(twin.parameters(), lr=lr), model=twin, rho=RHO)
    start = [parameter.detach().clone() for parameter in twin.parameters()]
    real.step(closure_of(twin, 0))
    for old, new, part in zip(start, twin.parameters(), direction.tensors, strict=True):
        torch.testing.assert_close(old - lr * part, new.detach())


def test_shadow_of_an_infinite_gradient_has_no_direction():
    model = make_model()
    shadow = Shadow("sam", model.parameters(), model)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    assert shadow.look(lambda: _spoil(model, closure_of(model, 0)())) is None
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
