"""Prompts that are mixed rather than chosen: the components of CODA-Prompt (Smith et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._ranges import Count, checked
from cflat.nn.backbone import Backbone
from cflat.nn.vit import Prefix, vit_of


class PromptComponents(nn.Module):
    """Prefixes for keys and values that each image mixes by attention over all components.

    Component m of a block has a prompt P_m, a key K_m and an attention vector A_m. An image with query q gets the
    prompt ``sum_m cos(q * A_m, K_m) P_m``, half of it before the keys and half before the values. Each task adds
    components; those of earlier tasks are frozen and still take part.
    """

    def __init__(self, backbone: Backbone, *, length: int = 8, layers: Sequence[int] = (0, 1, 2, 3, 4)) -> None:
        super().__init__()
        vit = vit_of(backbone)
        if length % 2:
            raise ValueError(f"length must be even, half for keys and half for values, got {length}.")
        if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(len(vit.blocks))):
            raise ValueError(
                f"Prompt layers must be different blocks of the {len(vit.blocks)} that {backbone.name} has, "
                f"got {list(layers)}."
            )
        self.layers, self.length, self.dim = tuple(layers), length, vit.embed_dim
        self.num_heads: int = vit.blocks[0].attn.num_heads  # type: ignore[union-attr,assignment]
        self.first_block = min(layers)
        """Where prompts first act."""
        # A member for each task, (layers, components, ...): freezing one leaves the others whole.
        self.prompts, self.keys, self.attention = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()

    @checked
    def grow(self, num_new: Count) -> None:
        """Freeze the components and add new ones, orthonormal and orthogonal to all of before."""
        for members, width in (
            (self.prompts, self.length * self.dim),
            (self.keys, self.dim),
            (self.attention, self.dim),
        ):
            members.requires_grad_(False)
            old = [member.flatten(2) for member in members]
            made = torch.stack(
                [orthonormal(num_new, width, [part[i] for part in old]) for i in range(len(self.layers))]
            )
            shape = (self.length, self.dim) if members is self.prompts else (self.dim,)
            device = old[0].device if old else None
            members.append(nn.Parameter(made.unflatten(2, shape).to(device)))

    def prefixes(self, query: Tensor) -> dict[int, Prefix]:
        """Return the prefixes of all prompted blocks for queries (B, D), for `vit.run_blocks`."""
        found = {}
        for index, layer in enumerate(self.layers):
            prompts, keys, attention = self._of_layer(index)
            attended = functional.normalize(query.to(keys.dtype)[:, None] * attention, dim=2)  # (B, M, D)
            weights = (attended * functional.normalize(keys, dim=1)).sum(dim=2)
            mixed = torch.einsum("bm,mld->bld", weights, prompts)
            heads = mixed.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            found[layer] = (heads[:, :, : self.length // 2], heads[:, :, self.length // 2 :])
        return found

    def orthogonality(self) -> Tensor:
        """Return how far prompts, keys and attention vectors are from orthonormal, summed over them and blocks."""
        # With the frozen components, to which new ones are to stay orthogonal.
        parts = [part for index in range(len(self.layers)) for part in self._of_layer(index)]
        return torch.stack([_gram_error(part.flatten(1)) for part in parts]).sum()

    def _of_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the prompts, keys and attention vectors of one block, those of all tasks."""
        prompts, keys, attention = (
            torch.cat([member[index] for member in members]) for members in (self.prompts, self.keys, self.attention)
        )
        return prompts, keys, attention


def orthonormal(num: int, dim: int, others: Sequence[Tensor] = ()) -> Tensor:
    """Return random orthonormal rows (num, dim), orthogonal to the rows of others; unit rows where there is no room."""
    rows = torch.randn(num, dim)
    known = torch.cat([rows[:0], *(other.detach().cpu().to(rows.dtype) for other in others)])
    if len(known) + num > dim:
        return functional.normalize(rows, dim=1)
    # Trained rows are no longer orthonormal. QR removes their whole span; the Gram-Schmidt of public code projects on
    # one after the other, which does not.
    basis = torch.linalg.qr(torch.cat([known, rows]).T).Q.T
    return basis[len(known) :].contiguous()


def _gram_error(rows: Tensor) -> Tensor:
    return (rows @ rows.T - torch.eye(len(rows), device=rows.device, dtype=rows.dtype)).square().mean()
