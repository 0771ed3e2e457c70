"""L2P: sizes, the sequence that the ViT sees, and how training images choose."""

import torch

from cflat.methods import StreamInfo, create_method
from cflat.methods.l2p import L2PConfig
from cflat.nn.backbone import create_backbone
from cflat.nn.vit import vit_of
from runs import tiny_method, tiny_stream


def test_parameter_count_on_vit_base():
    with torch.device("meta"):
        method = create_method("l2p", create_backbone("vit_base"), StreamInfo("class", 100))
        method.network.head.grow(100)
    (group,) = method.param_groups(None, None)
    assert sum(p.numel() for p in group.params) == 46_080 + 769 * 100


def test_features_are_the_mean_output_of_the_prompt_tokens():
    method = tiny_method("l2p", tiny_stream())
    network, images = method.network.eval(), torch.rand(2, 3, 8, 8)
    vit, ids = vit_of(network.backbone), torch.tensor([[0, 1, 2, 3, 9], [1, 2, 3, 4, 5]])
    patches = vit.patch_embed(images) + vit.pos_embed[:, 1:]
    first = vit.cls_token + vit.pos_embed[:, :1]
    prompts = network.prompts.prompts[ids].reshape(2, 25, 64) + vit.pos_embed[:, :1]
    outputs = vit.norm(vit.blocks(torch.cat([first.expand(2, -1, -1), prompts, patches], dim=1)))
    found = network.features(network.tokens(images), ids)
    torch.testing.assert_close(found, outputs[:, 1:26].mean(1))


def test_training_images_vote_or_choose_for_themselves():
    stream, query = tiny_stream(), torch.randn(8, 64)
    voted = tiny_method("l2p", stream).training_ids(query)
    assert (voted == voted[0]).all()
    method = tiny_method("l2p", stream, config=L2PConfig(training_selection="instancewise"))
    own = method.training_ids(query)
    assert (own != own[0]).any()
    assert torch.equal(own, method.test_ids(query, batchwise=False))
    cosines = torch.nn.functional.cosine_similarity(query[:, None], method.network.prompts.keys, dim=2)
    assert torch.equal(own, cosines.topk(5).indices.sort().values)
