"""Two gloo ranks: replicas stay bit-identical, take the same decisions, and equal one rank with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cases import BASES, CONV, MLP, case, closure_of, flat_weights, train
from faults import EVERY
from two_ranks import LONG, SHORT, Heads, share_of

SCRIPT = Path(__file__).parents[1] / "two_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks report, computed by two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    with open(folder / "log.txt", "w") as log:
        processes = [
            subprocess.Popen([*command, str(rank), str(folder)], env=environment, stdout=log, stderr=log)
            for rank in (0, 1)
        ]
        try:
            codes = [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0, 0], (folder / "log.txt").read_text()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def _whole_batch(row, num_steps, base="sgd"):
    model = MLP.model()
    optimizer = row.make(BASES[base](model), model=model)
    return train(optimizer, model, MLP, num_steps), flat_weights(model)


@pytest.mark.parametrize("row", EVERY, ids=str)
class TestEveryOptimizer:
    def test_replicas_are_identical_and_equal_one_rank(self, ranks, row):
        (first, first_counts), (second, second_counts) = (rank[row.id]["ddp"] for rank in ranks)
        assert torch.equal(first, second)
        counts, weights = _whole_batch(row, LONG)
        assert first_counts == second_counts == counts
        torch.testing.assert_close(first, weights, rtol=1e-12, atol=1e-12)

    def test_gradients_that_are_views_of_buckets_are_not_overwritten(self, ranks, row):
        (first, counts), (second, _) = (rank[row.id]["bucket_view"] for rank in ranks)
        assert torch.equal(first, second)
        expected, weights = _whole_batch(row, SHORT)
        assert counts == expected
        torch.testing.assert_close(first, weights, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("kind", ["local", "clipped"])
    def test_local_perturbations_agree_after_the_step(self, ranks, row, kind):
        (first, counts), (second, second_counts) = (rank[row.id][kind] for rank in ranks)
        assert torch.equal(first, second)
        assert counts == second_counts
        assert torch.isfinite(first).all()

    def test_ranks_that_use_different_parameters_agree_after_the_step(self, ranks, row):
        (first, is_untouched, evaluations), (second, _, other) = (rank[row.id]["heads"] for rank in ranks)
        assert torch.equal(first, second)
        assert evaluations == other
        assert is_untouched  # what no rank uses is not even decayed
        assert torch.isfinite(first).all()

    def test_ranks_with_different_gradients_take_the_same_branches(self, ranks, row):
        (first, nonfinite), (second, _) = (rank[row.id]["alone"] for rank in ranks)
        assert first == second
        assert nonfinite == 0

    def test_an_unwrapped_model_works(self, ranks, row):
        model = CONV.model()
        train(row.make(BASES["sgd"](model), model=model), model, CONV, SHORT)
        for rank in ranks:
            assert torch.equal(rank[row.id]["unwrapped"], flat_weights(model))

    def test_an_inf_on_one_rank_is_skipped_by_both(self, ranks, row):
        for first, second in zip(*(rank[row.id]["poisoned"] for rank in ranks), strict=True):
            assert first[1] == second[1] >= 1
            assert torch.equal(first[0][0], first[0][1])
            assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
            assert torch.equal(first[2], second[2])
            assert torch.isfinite(first[2]).all()

    def test_sharded_parameters_equal_the_unsharded_run(self, ranks, row):
        (first, evaluations, last), (second, _, _) = (rank[row.id]["sharded"] for rank in ranks)
        counts, weights = _whole_batch(row, SHORT)
        assert evaluations == sum(counts)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, weights, rtol=1e-11, atol=1e-12)
        assert last["evaluations"] == counts[-1]

    def test_qhm_as_base_equals_one_rank_with_replicas_and_with_shards(self, ranks, row):
        _, weights = _whole_batch(row, SHORT, "qhm")
        for kind in ("ddp_qhm", "sharded_qhm"):
            first, second = (rank[row.id][kind][0] for rank in ranks)
            assert torch.equal(first, second)
            torch.testing.assert_close(first, weights, rtol=1e-11, atol=1e-12)


def test_local_sam_descends_the_mean_of_the_ranks_sam_gradients(ranks):
    weights = []
    for rank in (0, 1):
        model = MLP.model()
        case("sam").make(BASES["sgd"](model)).step(closure_of(model, share_of(0, rank)))
        weights.append(flat_weights(model))
    assert not torch.allclose(*weights)
    torch.testing.assert_close(ranks[0]["local_step"], sum(weights) / 2, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_one_rank_uses_gets_half_of_its_gradient(ranks):
    """As DistributedDataParallel has it: the mean, with zeros where a rank has none."""
    start = flat_weights(Heads())
    moves = []
    for rank in (0, 1):
        net = Heads()
        inputs, labels = share_of(0, rank)
        F.cross_entropy(net(inputs, rank), labels).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        moves.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    expected = start - 0.1 * sum(moves) / 2
    for rank in ranks:
        torch.testing.assert_close(rank["heads_step"], expected, rtol=1e-12, atol=1e-12)
