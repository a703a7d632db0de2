# SPDX-License-Identifier: Apache-2.0
"""What the scores of past blocks are computed from: whole queries and keys, half of the channels,
FP8 rounding, or both.

Half of the channels: a projection of queries and one of keys, for each KV head, of which the
products come closest to q . k, in the mean square over queries and keys of other texts.

Shape legend: T tokens, Q rows that ask, H query heads, G KV heads, D head dim, J channels kept, L
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretrained.arms import EXACT, FP8, HALF, HALF_FP8
from pretrained.documents import Document
from pretrained.model import PretrainedError
from pretrained.reading import Asked, Reader


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Of one layer: a query's channels and a key's, for each KV head."""

    query_GDJ: Tensor
    key_GDJ: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreSides:
    """Queries and keys of which products, times the softmax scale, score blocks."""

    query_QHD: Tensor
    key_TGD: Tensor


def score_sides(
    q_QHD: Tensor, k_TGD: Tensor, scores: str, projection: Projection | None
) -> ScoreSides:
    """Queries and keys as they are scored.

    Raises:
        PretrainedError: half of the channels, and no projection.
    """
    if scores in (HALF, HALF_FP8):
        if projection is None:
            raise PretrainedError(f"scores={scores}: needs projections, and there are none")
        heads = k_TGD.shape[1]
        q_QGUD = q_QHD.unflatten(1, (heads, -1))
        q_QHD = torch.einsum("qgud,gdj->qguj", q_QGUD, projection.query_GDJ).flatten(1, 2)
        k_TGD = torch.einsum("tgd,gdj->tgj", k_TGD, projection.key_GDJ)
    elif scores not in (EXACT, FP8):
        raise PretrainedError(f"scores={scores}: must be {EXACT}, {HALF}, {FP8} or {HALF_FP8}")
    if scores in (FP8, HALF_FP8):
        q_QHD, k_TGD = rounded_to_fp8(q_QHD), rounded_to_fp8(k_TGD)
    return ScoreSides(query_QHD=q_QHD, key_TGD=k_TGD)


def rounded_to_fp8(vectors: Tensor) -> Tensor:
    """Rounded to e4m3, each vector with a scale of its own: no vector depends on another."""
    greatest = torch.finfo(torch.float8_e4m3fn).max
    scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-12) / greatest
    return (vectors / scale).to(torch.float8_e4m3fn).to(vectors.dtype) * scale


def half_of_channels(query_gram_GDD: Tensor, key_gram_GDD: Tensor) -> Projection:
    """The projections to half of the channels of the least mean square error of q . k.

    Args:
        query_gram_GDD, key_gram_GDD: sums of x x^T over queries and over keys.
    """
    query_root, key_root = (_root(gram) for gram in (query_gram_GDD, key_gram_GDD))
    left, strength, right_mT = torch.linalg.svd(query_root @ key_root)
    kept = query_gram_GDD.shape[-1] // 2
    # With queries as C^(1/2) x of uncorrelated x, the best product of rank J keeps the J greatest
    # singular values of the roots' product.
    weight = strength[:, None, :kept].clamp(min=1e-30).rsqrt()
    return Projection(
        query_GDJ=(key_root @ right_mT.mT[..., :kept] * weight).float(),
        key_GDJ=(query_root @ left[..., :kept] * weight).float(),
    )


def _root(gram_GDD: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram_GDD.double())
    return vectors * values.clamp(min=0)[:, None].sqrt() @ vectors.mT


def measure_projections(
    reader: Reader, documents: Sequence[Document], block_size: int
) -> list[Projection]:
    """Every layer's projections, from the queries and keys of densely read documents."""
    grams: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(asked: Asked) -> None:
        heads = asked.k_TGD.shape[1]
        q_GQD = asked.q_QHD.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).double()
        k_GTD = asked.k_TGD.transpose(0, 1).double()
        query, key = grams.get(asked.layer, (0, 0))
        grams[asked.layer] = query + q_GQD.mT @ q_GQD, key + k_GTD.mT @ k_GTD

    for document in documents:
        reader.observed(document, block_size, observe)
    return [half_of_channels(*grams[layer]) for layer in range(reader.layers)]


def save_projections(path: Path, projections: Sequence[Projection]) -> None:
    np.savez(
        path,
        query=torch.stack([each.query_GDJ for each in projections]).numpy(),
        key=torch.stack([each.key_GDJ for each in projections]).numpy(),
    )


def load_projections(path: Path) -> list[Projection]:
    with np.load(path) as kept:
        query_LGDJ, key_LGDJ = (torch.from_numpy(kept[name]) for name in ("query", "key"))
    return [
        Projection(query_GDJ=query, key_GDJ=key)
        for query, key in zip(query_LGDJ, key_LGDJ, strict=True)
    ]


def digest_of(projections: Sequence[Projection]) -> str:
    """Short, and equal for equal projections."""
    bits = b"".join(
        side.numpy().tobytes() for each in projections for side in (each.query_GDJ, each.key_GDJ)
    )
    return sha256(bits).hexdigest()[:16]
