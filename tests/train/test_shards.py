"""Networks spread over two ranks (FSDP2): what one rank learns with the whole network, in parts of the memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from cflat._errors import ConfigError
from cflat.config.presets import resolve_config
from cflat.train import Runtime, RuntimeSettings
from processes import in_ranks
from shard_run import CASES, learn, main, make

IN_SUITE = ["finetune-turbo", "finetune-averaged", "ease"]
OTHERS = sorted(set(CASES) - set(IN_SUITE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> list[dict]:
    return run_ranks(folder, IN_SUITE)


@pytest.fixture(scope="module")
def others_on_two_ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(tmp_path_factory.mktemp("shards"), OTHERS)


def run_ranks(folder: Path, cases: list[str]) -> list[dict]:
    in_ranks(2, main, str(folder / "out"), *cases)
    return [torch.load(folder / f"out.{rank}", weights_only=False) for rank in range(2)]


@cache
def alone(case: str, resumed: Path | None = None) -> dict:
    torch.set_default_dtype(torch.float64)
    try:
        return learn(case, Runtime(RuntimeSettings(accelerator="cpu")), resumed)
    finally:
        torch.set_default_dtype(torch.float32)


def assert_as_alone(results: list[dict], case: str) -> None:
    expected = alone(case)
    for result in results:
        torch.testing.assert_close(result[case]["state"], expected["state"], rtol=1e-9, atol=1e-9)
        assert str(result[case]["extra"]) == str(expected["extra"])
        for key in ("correct", "evaluations", "trainable"):
            assert result[case][key] == expected[key], key


@pytest.mark.parametrize("case", IN_SUITE)
def test_two_ranks_learn_what_one_does(case: str, on_two_ranks: list[dict]):
    """Full fine-tuning, and adapters on a frozen network; heads that grow and adapters that are new."""
    assert_as_alone(on_two_ranks, case)


@pytest.mark.parametrize("case", IN_SUITE)
def test_each_rank_keeps_its_half_of_the_blocks_through_all_tasks(case: str, on_two_ranks: list[dict]):
    size = sum(p.numel() for p in make(case).network.backbone.model.blocks.parameters())
    assert size > 0.9 * sum(p.numel() for p in make(case).network.backbone.parameters())
    kept = [result[case]["kept"] for result in on_two_ranks]
    assert all(first + second == size for first, second in zip(*kept, strict=True))
    assert all(abs(one - size / 2) < 0.01 * size for one in (*kept[0], *kept[1]))


@pytest.mark.parametrize("case", ["finetune-turbo", "finetune-averaged"])
def test_runs_that_were_stopped_go_on_bit_for_bit(case: str, on_two_ranks: list[dict]):
    for result in on_two_ranks:
        whole, resumed = result[case], result[f"resumed-{case}"]
        assert [key for key in whole["state"] if not torch.equal(whole["state"][key], resumed["state"][key])] == []
        assert whole["correct"] == resumed["correct"]
        assert whole["evaluations"] == resumed["evaluations"]


@pytest.mark.parametrize("case", ["finetune-turbo", "finetune-averaged"])
def test_a_run_that_was_stopped_in_parts_goes_on_in_one(case: str, on_two_ranks: list[dict], folder: Path):
    assert list((folder / f"stopped-{case}" / "checkpoints").glob("*.pt"))
    moved, expected = alone(case, folder / f"stopped-{case}"), alone(case)
    torch.testing.assert_close(moved["state"], expected["state"], rtol=1e-9, atol=1e-9)
    for key in ("correct", "evaluations", "trainable"):
        assert moved[key] == expected[key], key


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_methods_learn_the_same_in_parts(case: str, others_on_two_ranks: list[dict]):
    """Exemplars and micro-batches with checkpointing among them."""
    assert_as_alone(others_on_two_ranks, case)


@pytest.mark.parametrize(
    ("method", "backbone", "words"),
    [
        ("icarl", "vit_smoke", "copies or merges"),
        ("memo", "vit_smoke", "copies or merges"),
        ("duct", "vit_smoke", "copies or merges"),
        ("replay", "resnet8", "the blocks of a ViT"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_training(method: str, backbone: str, words: str):
    layer = {"method": method, "data": "digits", "preset": "smoke", "backbone": {"name": backbone}}
    with pytest.raises(ConfigError, match=words):
        resolve_config({**layer, "runtime": {"strategy": "fsdp"}})
