"""The trainer on two and four ranks: one model on all of them, and that of one rank with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from processes import in_ranks
from train.rank_run import METHODS, OPTIMIZERS, Case, alone, carry_out

TRAINED = [Case(method, optimizer) for method in METHODS if method != "simplecil" for optimizer in OPTIMIZERS]
WITH = {"icarl": "c_flat", "ease": "c_flat", "memo": "c_flat_turbo", "replay": "c_flat_turbo"}
QUICK = [Case(method, WITH.get(method, "none")) for method in METHODS]
"""All others are among the slow tests."""
LAST_OF_ONE = Case("memo", batch_size=16)
"""33 images: BatchNorm's last step would have one."""
TINY = Case("icarl", "c_flat", batch_size=3)
"""On four ranks, one of them never has an image."""
MICRO = Case("icarl", "c_flat", batch_size=4, accumulate=3)
APART = Case("icarl", batch_size=16, syncs=False)
POISONED = Case("icarl", "c_flat", poison="first")
AVERAGED = [Case("memo", "c_flat", ema=0.8), Case("icarl", batch_size=3, ema=0.8)]
"""BatchNorm's statistics are measured anew for the averaged weights, on shards that may be empty."""
ODD = {2: [LAST_OF_ONE, TINY, MICRO, APART, POISONED, *AVERAGED], 4: [LAST_OF_ONE, TINY, POISONED]}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def results_of(folder: Path, cases: list[Case], num_ranks: int, stops: bool = False) -> list[dict[Any, Any]]:
    """Return what each rank has learned, from processes that carry out all cases."""
    out = folder / f"ranks{num_ranks}"
    stopped = folder / f"stopped{num_ranks}"
    stopped.mkdir()
    in_ranks(num_ranks, carry_out, cases, out, num_ranks, stopped if stops else None)
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return {
        2: results_of(folder, [*QUICK, *ODD[2]], 2, stops=True),
        4: results_of(folder, ODD[4], 4),
    }


def assert_one_model(ranks: list[dict[str, Any]]) -> None:
    """All ranks have learned the same, bit for bit."""
    first, *others = ranks
    for other in others:
        assert_equal_states(first["state"], other["state"])
        for key in ("correct", "answers", "evaluations", "nonfinite", "images"):
            assert other[key] == first[key]
        assert str(other["extra"]) == str(first["extra"])


def assert_equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_as_alone(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same answers and exemplars, and weights to rounding in double precision."""
    for key in ("correct", "answers", "evaluations", "images"):
        assert got[key] == expected[key], key
    assert str(got["extra"]) == str(expected["extra"])
    assert got["flops"] == pytest.approx(expected["flops"])
    for name, value in expected["state"].items():
        close = CLOSE if value.dtype == torch.float64 else {}  # EASE keeps its prototypes in single precision
        torch.testing.assert_close(got["state"][name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.method}-{case.optimizer}")
def test_two_ranks_equal_one_with_the_whole_batch(case: Case, by_ranks: dict[int, list[dict[Any, Any]]]) -> None:
    ranks = [results[case] for results in by_ranks[2]]
    assert_one_model(ranks)
    assert_as_alone(ranks[0], alone(case))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", [LAST_OF_ONE, TINY], ids=["last of one", "fewer than ranks"])
def test_uneven_and_empty_shards_weigh_as_their_images(
    case: Case, num_ranks: int, by_ranks: dict[int, list[dict[Any, Any]]]
) -> None:
    ranks = [results[case] for results in by_ranks[num_ranks]]
    assert_one_model(ranks)
    assert_as_alone(ranks[0], alone(case))


@pytest.mark.parametrize("case", AVERAGED, ids=lambda case: case.method)
def test_averaged_weights_and_their_statistics_equal_those_of_one_rank(
    case: Case, by_ranks: dict[int, list[dict[Any, Any]]]
) -> None:
    ranks = [results[case] for results in by_ranks[2]]
    assert_one_model(ranks)
    assert_as_alone(ranks[0], alone(case))


@pytest.mark.parametrize("case", [MICRO, APART], ids=["micro-batches", "apart"])
def test_where_batchnorm_sees_other_images_ranks_are_still_one_model(
    case: Case, by_ranks: dict[int, list[dict[Any, Any]]]
) -> None:
    ranks = [results[case] for results in by_ranks[2]]
    assert_one_model(ranks)
    weights = "network.backbone.model.layer1.0.weight"
    assert not torch.allclose(ranks[0]["state"][weights], alone(case)["state"][weights])  # or it was synchronised


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_give_up_the_step_in_which_one_meets_inf(
    num_ranks: int, by_ranks: dict[int, list[dict[Any, Any]]]
) -> None:
    ranks = [results[POISONED] for results in by_ranks[num_ranks]]
    assert_one_model(ranks)
    assert ranks[0]["nonfinite"] == 1
    assert all(value.isfinite().all() for value in ranks[0]["state"].values())


def test_a_stop_that_one_rank_hears_stops_all_and_leaves_no_trace(by_ranks: dict[int, list[dict[Any, Any]]]) -> None:
    for results in by_ranks[2]:
        assert results["stopped"]["stopped"] == 2 * ["The run was asked to stop; its state is saved."]
        assert_equal_states(results["stopped"]["state"], results["whole"]["state"])


@pytest.mark.slow
def test_every_method_and_optimizer_on_two_and_four_ranks(tmp_path: Path) -> None:
    expected = {case: alone(case) for case in TRAINED}
    for num_ranks in (2, 4):
        results = results_of(tmp_path, TRAINED, num_ranks)
        for case in TRAINED:
            ranks = [one[case] for one in results]
            assert_one_model(ranks)
            assert_as_alone(ranks[0], expected[case])
