"""Prompts: sizes, selection and its ties, the layout of prefixes and of the others' bug."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cflat.nn import vit
from cflat.nn.backbone import Backbone, create_backbone
from cflat.nn.heads import LinearHead
from cflat.nn.prompts import PrefixPrompts, PromptPool, majority
from nn.passes import vit_features


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture
def backbone() -> Backbone:
    return create_backbone("vit_smoke").eval()


def test_parameter_counts_on_vit_base() -> None:
    with torch.device("meta"):
        base = create_backbone("vit_base")
        pool, prefixes, head = PromptPool(768), PrefixPrompts(base), LinearHead(768, 200)
    assert count(pool) == 46_080
    assert count(pool) + count(head) == 199_880
    assert count(prefixes) == 253_440
    assert [prefixes.general.numel(), prefixes.experts.numel(), prefixes.keys.numel()] == [15_360, 230_400, 7_680]


def test_everything_starts_uniform_between_minus_one_and_one(backbone: Backbone) -> None:
    for parameter in [*PromptPool(64).parameters(), *PrefixPrompts(backbone).parameters()]:
        assert 0.9 < parameter.abs().max() <= 1
        assert abs(parameter.mean()) < 0.1


def test_instances_choose_their_nearest_keys() -> None:
    pool, query = PromptPool(16, pool_size=6, top_k=2), torch.randn(5, 16)
    ids = pool.select(query, batchwise=False)
    cosines = torch.nn.functional.cosine_similarity(query[:, None], pool.keys[None], dim=-1)
    assert torch.equal(ids, cosines.argsort(1, descending=True)[:, :2])
    expected = cosines.gather(1, ids).sum(1).mean()
    torch.testing.assert_close(pool.agreement(query, ids), expected)


def test_batches_choose_by_majority() -> None:
    ids = torch.tensor([[0, 1], [4, 1], [4, 2], [4, 1]])
    assert majority(ids, 6)[:, 0].unique().item() in (1, 4)
    assert {*majority(ids, 6)[0].tolist()} == {1, 4}
    assert majority(ids, 6).shape == ids.shape


def test_ties_follow_the_public_rule() -> None:
    ids = torch.tensor([[5, 2], [2, 5], [3, 7]])
    # Distinct ids ascending with counts, padded to the pool with the smallest id and count 0.
    distinct = torch.tensor([2, 3, 5, 7, 2, 2, 2, 2])
    counts = torch.tensor([2, 1, 2, 1, 0, 0, 0, 0])
    assert torch.equal(majority(ids, 8)[0], distinct[counts.topk(2).indices])


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(9)), st.integers(0, 2**31))
def test_majority_ignores_the_order_of_the_batch(order: list[int], seed: int) -> None:
    query = torch.randn(9, 8, generator=torch.Generator().manual_seed(seed))
    pool = PromptPool(8)
    assert torch.equal(pool.select(query)[0], pool.select(query[list(order)])[0])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31))
def test_a_batch_of_one_equals_its_instance(seed: int) -> None:
    query = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    pool = PromptPool(8)
    batchwise, instance = pool.select(query), pool.select(query, batchwise=False)
    assert {*batchwise[0].tolist()} == {*instance[0].tolist()}


def test_prompt_tokens_are_those_of_the_ids() -> None:
    pool = PromptPool(4, pool_size=3, length=2, top_k=2)
    tokens = pool.tokens(torch.tensor([[2, 0]]))
    assert torch.equal(tokens[0], torch.cat([pool.prompts[2], pool.prompts[0]]))
    assert tokens.shape[1] == 4


def test_the_order_of_ids_does_not_change_prompt_features(backbone: Backbone) -> None:
    pool, tokens = PromptPool(64), vit.embed(backbone, torch.rand(1, 3, 8, 8))

    def features(ids: list[int]) -> torch.Tensor:
        return pool.features(backbone, tokens, torch.tensor([ids]))

    torch.testing.assert_close(features([1, 4, 2, 0, 7]), features([7, 2, 1, 0, 4]), atol=1e-5, rtol=1e-4)


def test_selection_has_no_gradient_and_agreement_moves_keys() -> None:
    pool, query = PromptPool(8), torch.randn(3, 8)
    ids = pool.select(query)
    pool.agreement(query, ids).backward()
    used = pool.keys.grad.abs().sum(1) > 0
    assert {*used.nonzero().flatten().tolist()} == {*ids[0].tolist()}


def test_prefixes_reach_their_blocks_in_the_right_layout(backbone: Backbone) -> None:
    prompts = PrefixPrompts(backbone, pool_size=3, length=2)
    ids = torch.tensor([2, 0, 2, 1])
    found = prompts.prefixes(ids)
    assert found.keys() == {0, 1, 2, 3, 4}
    for sample, expert in enumerate(ids):
        for kind in (0, 1):
            assert torch.equal(found[3][kind][sample], prompts.experts[1, kind, expert].transpose(0, 1))
    assert torch.equal(found[1][1][0], prompts.general[1, 1].transpose(0, 1))
    assert found[0][0].shape == (1, 4, 2, 16)
    assert found[3][0].shape == (4, 4, 2, 16)


def test_prefixed_samples_do_not_hear_of_each_other(backbone: Backbone) -> None:
    prompts, images = PrefixPrompts(backbone), torch.rand(4, 3, 8, 8)
    ids = torch.tensor([3, 0, 9, 3])
    together = vit_features(backbone, images, prefixes=prompts.prefixes(ids))
    for sample in range(4):
        alone = vit_features(backbone, images[sample : sample + 1], prefixes=prompts.prefixes(ids[sample : sample + 1]))
        torch.testing.assert_close(together[sample], alone[0], atol=1e-5, rtol=1e-4)


def test_legacy_layout_is_the_known_bug(backbone: Backbone) -> None:
    prompts = PrefixPrompts(backbone, legacy_layout=True)
    keys, values = prompts.prefixes(torch.zeros(4, dtype=torch.int64))[2]
    true_keys, true_values = (part.transpose(0, 1) for part in prompts.experts[0, :, 0])
    for sample in (0, 1):  # the first half of the batch gets keys for both, the second half values
        assert torch.equal(keys[sample], true_keys)
        assert torch.equal(values[sample], true_keys)
    for sample in (2, 3):
        assert torch.equal(keys[sample], true_values)
        assert torch.equal(values[sample], true_values)


def test_experts_are_selected_and_copied(backbone: Backbone) -> None:
    prompts = PrefixPrompts(backbone)
    query = prompts.keys[[4, 4, 7]].detach() + 0.01
    assert prompts.select(query, batchwise=False).tolist() == [4, 4, 7]
    assert prompts.select(query).tolist() == [4, 4, 4]
    torch.testing.assert_close(prompts.agreement(prompts.keys[:2].detach(), torch.tensor([0, 1])), torch.tensor(1.0))
    key = prompts.keys[5].detach().clone()
    prompts.copy_expert_(4, 5)
    assert torch.equal(prompts.experts[:, :, 5], prompts.experts[:, :, 4])
    assert torch.equal(prompts.keys[5], key)


def test_wrong_sizes_are_named(backbone: Backbone) -> None:
    with pytest.raises(ValueError, match="top_k must be"):
        PromptPool(8, pool_size=3, top_k=4)
    with pytest.raises(ValueError, match=r"different blocks of the 6 .* got \[0, 1, 6\]"):
        PrefixPrompts(backbone, expert_layers=(6,))
