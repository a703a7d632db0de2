# SPDX-License-Identifier: Apache-2.0
"""One rank's Megatron modules, part by part, as pairs of a forward and a backward to time.

Import only after the CPU adapter has been installed where it is needed.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, h hidden size, S
samples.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.router import router_scores, select_blocks
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.compat import enable_variable_lengths
from sparsebalance_megatron.cost.kinds import Kind
from sparsebalance_megatron.runtime.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.runtime.layer_spec import sparse_balance_layer_spec
from sparsebalance_megatron.runtime.packed_params import (
    BudgetedPackedSeqParams,
    MicroBatchContext,
    packed_params,
)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A part of the model on one micro-batch.

    ``forward`` returns what ``backward`` starts from; without a backward the part has no gradient.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None] | None


class ProfiledModel:
    """A GPT with one layer, built from training's flags with this plugin's core attention.

    Args:
        args: Megatron's parsed flags, already cut down to one rank's share.
        options: what the layer's core attention is built with.
        device: where to build it.
    """

    def __init__(self, args: Namespace, options: AttentionOptions, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._max_seqlen_tokens = args.seq_length
        self._vocabulary = args.padded_vocab_size
        _start_single_process(args, device)
        self._config = core_transformer_config_from_args(args)
        enable_variable_lengths(self._config)
        self._model = _build(args, self._config, options, device)
        self._layer = self._model.decoder.layers[0]
        self._core_attention: BudgetedCoreAttention = self._layer.self_attention.core_attention
        # What the layer costs without attention, which is timed by itself.
        self._layer.self_attention.core_attention = _PassQueries()
        self._generator = torch.Generator(device=device).manual_seed(args.seed)

    def passes(
        self, lengths_tokens: Sequence[int], budget_blocks: int
    ) -> dict[Kind, Pass]:
        """Every part on a micro-batch of random data, all samples at one budget."""
        context = self._context(lengths_tokens, budget_blocks)
        params = packed_params(
            context, max_seqlen_tokens=self._max_seqlen_tokens, device=self._device
        )
        tokens = sum(lengths_tokens)
        return {
            **self._attention_passes(tokens, context),
            Kind.LINEAR: self._linear_pass(tokens, params),
            Kind.EMBEDDING: self._embedding_pass(tokens),
            Kind.HEAD: self._head_pass(tokens),
        }

    def _context(self, lengths_tokens: Sequence[int], budget_blocks: int) -> MicroBatchContext:
        return MicroBatchContext(
            step=0,
            position=0,
            chunk=0,
            layout=packed_layout(
                tuple(accumulate(lengths_tokens, initial=0)), self._options.block_size, self._device
            ),
            budgets_LS=torch.full(
                (1, len(lengths_tokens)), budget_blocks, dtype=torch.int32, device=self._device
            ),
            max_budgets=(budget_blocks,),
            observe=True,
        )

    def _attention_passes(self, tokens: int, context: MicroBatchContext) -> dict[Kind, Pass]:
        heads, groups = self._config.num_attention_heads, self._config.num_query_groups
        head_dim = self._config.kv_channels
        q_THD, k_TGD, v_TGD = (
            self._random(tokens, count, head_dim).requires_grad_()
            for count in (heads, groups, groups)
        )
        selection = self._select(q_THD, k_TGD, context, guarded=False)

        def attend() -> Tensor:
            out_THD, _ = block_sparse_attention(
                q_THD,
                k_TGD,
                v_TGD,
                selection,
                softmax_scale=self._core_attention.softmax_scale,
                implementation=self._options.implementation,
            )
            return out_THD

        return {
            Kind.ATTENTION: Pass(
                forward=attend, backward=_backward_from(self._random(tokens, heads, head_dim))
            ),
            Kind.ROUTER: Pass(
                forward=lambda: self._select(q_THD, k_TGD, context, guarded=True), backward=None
            ),
        }
