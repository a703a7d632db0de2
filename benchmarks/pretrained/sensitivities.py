# SPDX-License-Identifier: Apache-2.0
"""How much single layers need their budgets, measured on documents that are not scored.

Shape legend: L layers, H query heads, Q query tokens, N blocks, K budgets, X scored labels.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from pretrained.arms import REFERENCE
from pretrained.documents import Document
from pretrained.reading import Asked, Reader
from pretrained.rules import masses
from sparsebalance_megatron.attention.repetitions import Repetitions

QUANTILE = 0.99
CUT_BLOCKS = 2
"""Budget of the layer that is cut: its own block and the first."""


def peaks(reader: Reader, documents: Sequence[Document], block_size: int) -> list[float]:
    """How peaked attention to far blocks is, by layer, the mean over documents.

    The greatest softmax mass that a token's head puts on a single block that is neither its own,
    nor the one before, nor the document's first; of all tokens and heads the 99th percentile.
    """
    found: list[list[float]] = [[] for _ in range(reader.layers)]

    def observe(asked: Asked) -> None:
        own_Q1 = asked.layouts.kv_block(by_token=True)[:, None]
        number_N = torch.arange(asked.layouts.kv_layout.blocks)
        far_QN = (number_N > 0) & (number_N < own_Q1 - 1)
        mass_HQN = torch.cat(list(masses(asked)), 1)
        found[asked.layer].append(_peak(mass_HQN, far_QN))

    for document in documents:
        reader.observed(document, block_size, observe)
    return list(map(fmean, found))


def _peak(mass_HQN: Tensor, far_QN: Tensor) -> float:
    return float(mass_HQN.masked_fill(~far_QN, 0.0).amax(-1).flatten().quantile(QUANTILE))


def repetitions(reader: Reader, documents: Sequence[Document], block_size: int) -> list[float]:
    """What ``sparse-balance sensitivity`` measures: attention to far tokens that text repeats."""
    heads = reader.model.config.num_attention_heads
    found = Repetitions(reader.layers, heads, torch.device("cpu"))

    def observe(asked: Asked) -> None:
        layout, scale = asked.layouts.kv_layout, asked.softmax_scale
        found.add(asked.layer, asked.q_QHD, asked.k_TGD, layout, softmax_scale=scale)

    for document in documents:
        found.tokens_T = torch.tensor(document.tokens[:-1])
        reader.observed(document, block_size, observe)
    return found.sensitivity_L()


@torch.inference_mode()
def cuts(reader: Reader, documents: Sequence[Document], block_size: int) -> list[float]:
    """The loss that cutting a layer's budget from 8 blocks to 2 adds, nats a scored label.

    All layers read by the reference. The states before a layer are those of the uncut pass.
    """
    added: list[list[float]] = [[] for _ in range(reader.layers)]
    for document in documents:
        uncut = [REFERENCE.blocks] * reader.layers
        _configure(reader, block_size, uncut)
        tokens_1T = torch.tensor([document.tokens[:-1]])
        states = reader.model.model(
            tokens_1T, use_cache=False, output_hidden_states=True
        ).hidden_states
        base = _loss_from(reader, document, states[-2], reader.layers - 1)
        for layer in range(reader.layers):
            _configure(reader, block_size, [*uncut[:layer], CUT_BLOCKS, *uncut[layer + 1 :]])
            added[layer].append(_loss_from(reader, document, states[layer], layer) - base)
    return list(map(fmean, added))


def _configure(reader: Reader, block_size: int, budgets: Sequence[int]) -> None:
    first_blocks = REFERENCE.first_blocks
    reader.configure(block_size, REFERENCE.selection, budgets, sparse_init_block=first_blocks)


def _loss_from(reader: Reader, document: Document, states_1TE: Tensor, layer: int) -> float:
    """Mean loss of a document's labels, from the states before a layer."""
    model, tokens = reader.model.model, document.length
    positions = model.rotary_emb(states_1TE, torch.arange(tokens)[None])
    # What the attention takes for a mask: one document, which begins at token 0.
    starts_1T = torch.zeros(1, tokens, dtype=torch.int64)
    for module in model.layers[layer:]:
        states_1TE = module(states_1TE, attention_mask=starts_1T, position_embeddings=positions)
    scored_X = torch.tensor(document.scored)
    label_X = torch.tensor(document.tokens)[scored_X + 1]
    states_XE = model.norm(states_1TE)[0][scored_X]
    return float(reader.scores_of(states_XE, label_X).loss_X.mean())
