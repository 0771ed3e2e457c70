"""Whole passes through a ViT with something in its blocks."""

from cflat.nn import vit


def vit_features(backbone, images, **parts):
    """Return features (B, D) of images with adapters or prefixes in the blocks."""
    return vit.pool(backbone, vit.run_blocks(backbone, vit.embed(backbone, images), **parts))
