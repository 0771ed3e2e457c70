"""Properties of the vector algebra, the trigger and the radius schedules, over random inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cflat
from cflat.optim._memory import DirectionMemory
from cflat.optim._triggers import EmaTrigger
from cflat.optim._vectors import NonFiniteError, Space, Vector, as_real, dot, read
from cflat.optim._weights import Weights

PROPERTY = settings(max_examples=50, deadline=None, derandomize=True)
EPS = 1e-12

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5)
SCALES = st.floats(-6, 6).map(lambda exponent: 10.0**exponent)
NUMBERS = st.floats(-1e3, 1e3)


def draw_tensors(shapes: list[tuple[int, ...]], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def flat(vector: Vector) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in vector.tensors])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Vector, Vector]:
    """Two vectors of the same space, of very different lengths."""
    shapes, seed = draw(SHAPES), draw(st.integers(0, 2**31))
    return (
        Vector(draw_tensors(shapes, seed, draw(SCALES))),
        Vector(draw_tensors(shapes, seed + 1, draw(SCALES))),
    )


@PROPERTY
@given(pairs())
def test_norm_and_dot_are_those_of_the_flat_vector(pair: tuple[Vector, Vector]) -> None:
    x, y = pair
    assert x.norm == pytest.approx(flat(x).norm().item(), rel=1e-12)
    assert x.agreed_norm == x.norm
    limit = 1e-12 * x.norm * y.norm
    assert dot(x, y).item() == pytest.approx((flat(x) @ flat(y)).item(), abs=limit)
    assert dot(x, y).item() == pytest.approx(dot(y, x).item(), abs=limit)
    assert dot(x, x).item() == pytest.approx(x.norm**2, rel=1e-12)
    assert x.numel == flat(x).numel()


@PROPERTY
@given(pairs())
def test_reading_together_equals_reading_apart(pair: tuple[Vector, Vector]) -> None:
    x, y = pair
    norms = [Vector(x.tensors).norm, Vector(y.tensors).norm]
    assert read(x, y, dot(x, y)) == [*norms, dot(x, y).item()]


@PROPERTY
@given(pairs())
def test_removing_along_a_reference_leaves_an_orthogonal_vector(pair: tuple[Vector, Vector]) -> None:
    g_f, g_0 = pair
    before, length = flat(g_f).clone(), g_f.norm
    inner = dot(g_f, g_0).item()
    g_vf = g_f.remove_along_(g_0, inner)
    limit = (1e-11 + EPS**2 / g_0.norm**2) * length * g_0.norm
    assert abs((flat(g_vf) @ flat(g_0)).item()) <= limit
    assert g_vf.norm <= length * (1 + 1e-12)
    # What was removed lies along the reference.
    removed = before - flat(g_vf)
    assert removed.norm().item() * g_0.norm == pytest.approx(abs((removed @ flat(g_0)).item()), abs=limit)


@PROPERTY
@given(pairs(), NUMBERS)
def test_cached_norms_stay_true(pair: tuple[Vector, Vector], alpha: float) -> None:
    """A norm that has been read must follow every operation or be forgotten."""
    x, y = pair
    read(x, y)
    for change in (
        lambda v: v.scale_(alpha),
        lambda v: v.scaled(alpha),
        lambda v: v.add_(y, alpha),
        lambda v: v.minus(y),
        lambda v: v.absolute(plus=0.5),
        lambda v: v.mul_(y),
        lambda v: v.remove_along_(y, dot(v, y).item()),
        lambda v: v.clone(),
    ):
        changed = change(x.clone())
        assert changed.norm == pytest.approx(flat(changed).norm().item(), rel=1e-9, abs=1e-12)


@PROPERTY
@given(pairs(), NUMBERS)
def test_operations_are_those_of_the_flat_vector(pair: tuple[Vector, Vector], alpha: float) -> None:
    x, y = pair
    a, b = flat(x).clone(), flat(y).clone()
    close = {"rtol": 1e-12, "atol": 1e-12 * (a.abs().max() + b.abs().max()).item() * (1 + abs(alpha))}
    torch.testing.assert_close(flat(x.scaled(alpha)), alpha * a, **close)
    torch.testing.assert_close(flat(x.minus(y)), a - b, **close)
    torch.testing.assert_close(flat(x.absolute(plus=0.3)), a.abs() + 0.3, **close)
    assert torch.equal(flat(x), a)  # none of these touches its operands
    torch.testing.assert_close(flat(x.clone().add_(y, alpha)), a + alpha * b, **close)
    assert torch.equal(flat(x.clone().mul_(y)), a * b)
    assert torch.equal(flat(x), a)
    assert torch.equal(flat(y), b)


@PROPERTY
@given(pairs(), st.floats(1e-3, 10))
def test_moves_have_the_length_of_the_radius(pair: tuple[Vector, Vector], radius: float) -> None:
    theta, direction = pair
    params = [torch.nn.Parameter(tensor.clone()) for tensor in theta.tensors]
    for param in params:
        param.grad = torch.ones_like(param)
    weights = Weights(params)
    weights.collect()
    with torch.no_grad():
        expected = radius * direction.norm / (direction.norm + EPS)
        weights.jump(direction, radius)
        moved = flat(Vector(params)) - flat(theta)
        assert moved.norm().item() == pytest.approx(expected, rel=1e-9, abs=1e-12 * theta.norm)
        weights.walk(direction, radius)
        weights.jump(direction, 2 * radius)  # from theta, not from where the walk led
        moved = flat(Vector(params)) - flat(theta)
        assert moved.norm().item() == pytest.approx(2 * expected, rel=1e-9, abs=1e-12 * theta.norm)
        weights.restore()
    assert torch.equal(flat(Vector(params)), flat(theta))


@PROPERTY
@given(SHAPES)
def test_the_unit_vector_of_zero_is_zero(shapes: list[tuple[int, ...]]) -> None:
    params = [torch.nn.Parameter(tensor) for tensor in draw_tensors(shapes, 0)]
    before = flat(Vector(params)).clone()
    for param in params:
        param.grad = torch.zeros_like(param)
    weights = Weights(params)
    with torch.no_grad():
        weights.jump(weights.collect(), 0.5)
    assert torch.equal(flat(Vector(params)), before)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_reading_refuses_what_is_not_finite(bad: float) -> None:
    vector = Vector([torch.ones(3), torch.tensor([1.0, bad])])
    with pytest.raises(NonFiniteError):
        read(Vector([torch.ones(2)]), vector)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    """In the dtype itself a sum of 4096 ones ends at 256 (bfloat16) or 2048 (float16)."""
    x = Vector([torch.full((4096,), 1.0, dtype=dtype), torch.full((4096,), 300.0, dtype=dtype)])
    exact = 4096 * (1.0 + 300.0**2)
    assert x.norm**2 == pytest.approx(exact, rel=1e-5)
    assert dot(x, x).item() == pytest.approx(exact, rel=1e-5)


@PROPERTY
@given(st.integers(0, 2**31))
def test_complex_tensors_keep_norm_and_inner_product(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 3, generator=generator, dtype=torch.complex128) for _ in range(2))
    left, right = Vector([as_real(x)]), Vector([as_real(y)])
    assert left.norm == pytest.approx(torch.linalg.vector_norm(x).item(), rel=1e-12)
    assert dot(left, right).item() == pytest.approx(torch.sum(x.conj() * y).real.item(), abs=1e-12)


@PROPERTY
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=40),
    st.floats(0, 0.99),
    st.floats(0, 3),
    st.booleans(),
)
def test_trigger_equals_the_sums_it_abbreviates(values: list[float], d: float, m: float, is_rooted: bool) -> None:
    """mu_j = (1-d) sum_i d^(j-i) x_i and likewise sigma_j, written out; mu_0 = 0, sigma_0 = 1e-8."""
    trigger = EmaTrigger(d, is_rooted=is_rooted)
    mus: list[float] = []
    for j, x in enumerate(values, start=1):
        mus.append((1 - d) * sum(d ** (j - i) * values[i - 1] for i in range(1, j + 1)))
        spread = d**j * 1e-8
        spread += (1 - d) * sum(d ** (j - i) * (values[i - 1] - mus[i - 1]) ** 2 for i in range(1, j + 1))
        bar = mus[-1] + m * (math.sqrt(spread) if is_rooted else spread)
        fires = trigger.fires(x, m)
        if abs(x - bar) > 1e-9 * max(1.0, bar):  # nearer than rounding either answer is right
            assert fires == (x > bar and x > 0)
        assert trigger.mean == pytest.approx(mus[-1], rel=1e-9, abs=1e-12)
        assert trigger.spread == pytest.approx(spread, rel=1e-8, abs=1e-12)


@PROPERTY
@given(st.lists(st.floats(1, 100), min_size=5, max_size=30), st.floats(1, 1e4), st.floats(0.1, 3))
def test_rooted_trigger_does_not_depend_on_the_scale_of_the_loss(
    values: list[float], scale: float, threshold: float
) -> None:
    """Only up to the initial dispersion of 1e-8, which has a scale; hence values far above it."""
    first, second = (EmaTrigger(0.9, is_rooted=True) for _ in range(2))
    for x in values:
        fires = first.fires(x, threshold)
        margin = abs(x - first.mean - threshold * first.spread**0.5)
        fires_scaled = second.fires(scale * x, threshold)
        if margin > 1e-4 * max(values):
            assert fires == fires_scaled


def test_printed_trigger_depends_on_the_scale_of_the_loss() -> None:
    """The squared deviation is compared with a mean, as the paper prints it (optimizers.md 6)."""
    small, large = EmaTrigger(0.9, is_rooted=False), EmaTrigger(0.9, is_rooted=False)
    assert small.fires(0.1, 1.0)
    assert not large.fires(100.0, 1.0)


def test_zero_never_fires() -> None:
    trigger = EmaTrigger(0.9, is_rooted=True)
    assert not trigger.fires(0.0, 0.0)


@pytest.mark.parametrize("name", ["ae_sam", "c_flat_turbo", "c_flat_forecast"])
def test_a_task_forgets_the_statistics_of_the_one_before(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = cflat.create_optimizer(name, torch.optim.SGD([weight], lr=0.1))
    fresh = optimizer.extra_state()
    for _ in optimizer.passes():
        weight.square().sum().backward()
    assert optimizer.extra_state() != fresh
    optimizer.start_task(1)
    assert optimizer.extra_state() == fresh


@PROPERTY
@given(st.floats(1e-4, 10), st.integers(0, 10_000), st.floats(0, 1))
def test_inverse_sqrt_is_the_schedule_of_the_theorem(rho_0: float, step: int, lr: float) -> None:
    assert cflat.InverseSqrt(rho_0)(step, lr) == pytest.approx(rho_0 / math.sqrt(step + 1), rel=1e-12)


@PROPERTY
@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 0.1), st.floats(0.01, 1), st.floats(0, 1))
def test_tied_radius_is_affine_between_its_ends(
    rho_min: float, rho_span: float, lr_min: float, lr_span: float, share: float
) -> None:
    rho_max, lr_max = rho_min + rho_span, lr_min + lr_span
    tied = cflat.TiedToLR(rho_max=rho_max, lr_max=lr_max, rho_min=rho_min, lr_min=lr_min)
    assert tied(0, lr_min) == pytest.approx(rho_min, abs=1e-9)
    assert tied(7, lr_max) == pytest.approx(rho_max, rel=1e-9)
    between = tied(3, lr_min + share * lr_span)
    assert between == pytest.approx(rho_min + share * rho_span, rel=1e-6, abs=1e-9)


@PROPERTY
@given(SHAPES, st.integers(0, 2**31))
def test_memory_returns_what_it_was_given_for_any_order_of_parameters(shapes, seed: int) -> None:
    params = [torch.nn.Parameter(tensor) for tensor in draw_tensors(shapes, seed)]
    parts = draw_tensors(shapes, seed + 1)
    memory = DirectionMemory()
    memory.store(params, Vector([part.clone() for part in parts]))
    like = Vector([param.detach() for param in params[::-1]])
    recalled = memory.recall(params[::-1], like)
    assert recalled is not None
    assert all(torch.equal(a, b) for a, b in zip(recalled.tensors, parts[::-1], strict=True))
    stranger = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float64))
    assert memory.recall([stranger], Vector([stranger.detach()])) is None


def test_a_memory_lets_go_of_the_ranks_of_its_step():
    """A process group that outlives ``destroy_process_group`` is torn down late, at the exit of the interpreter."""
    params = [nn.Parameter(torch.zeros(2))]
    memory, group = DirectionMemory(), object()
    vector = Vector([torch.ones(2)], Space(group))
    memory.store(params, vector)
    memory.commit()
    assert vector.space.group is None
    assert memory.recall(params, Vector([torch.zeros(2)], Space(group))).space.group is group
    memory.undo()
    assert vector.space.group is None
