# SPDX-License-Identifier: Apache-2.0
"""What profiling times: one rank's Megatron modules part by part, and exchanges between ranks.

Import after the CPU adapter has been installed.

Shape legend: F of values, h hidden size.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    attends_densely,
    block_sparse_attention,
    dense_attention,
    dense_kernel,
)
from sparsebalance_megatron.attention.kernels import fa4_lists
from sparsebalance_megatron.attention.kernels.contract import wide_dtype
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.earlier_segments import segment_slice
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.config import (
    AttentionImplementation,
    DenseAttention,
    SparseBalanceConfig,
)
from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.parts import Part
from sparsebalance_megatron.cost.table import ExchangeRow
from sparsebalance_megatron.megatron.compat import enable_variable_lengths, gpt_model
from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.packed_seq_params import (
    BudgetedPackedSeqParams,
    LocalMicroBatch,
    local_micro_batches,
)
from sparsebalance_megatron.megatron.sequence_groups import make_sequence_groups
from sparsebalance_megatron.megatron.settings import dtype_name, head_dims, model_shape
from sparsebalance_megatron.megatron.single_process import (
    data_parallel_world,
    start_single_process,
    transformer_config,
)
from sparsebalance_megatron.megatron.timing import Clock
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.profile.cells import (
    Cell,
    Thoroughness,
    Timed,
    median_and_spread,
    time_once,
    with_backward,
)

_DIVISORS = (4, 1)
"""Sequences are the sequence length over each of these."""
_TIMEOUT_MINUTES = 10.0


class ProfiledModel:
    """A GPT with one layer and this plugin's core attention, from flags cut to one rank's share."""

    def __init__(self, args: Namespace, options: AttentionOptions, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._max_seqlen_tokens = args.seq_length
        self._vocabulary = args.padded_vocab_size
        start_single_process(args.seed, device)
        self._config = transformer_config(args)
        enable_variable_lengths(self._config)
        self._model = _build(args, self._config, options, device)
        self._layer = self._model.decoder.layers[0]
        self._core_attention = self._layer.self_attention.core_attention
        self._select = self._core_attention.select
        # What the layer costs without attention, which is timed by itself.
        self._layer.self_attention.core_attention = _PassQueries()
        self._mlp = self._layer.mlp
        self.has_experts = bool(self._config.num_moe_experts)
        if self.has_experts:
            self._layer.mlp = _PassHidden()

    @property
    def list_kernels(self) -> list[AttentionImplementation]:
        """Who attends to lists: whom the config names, else FlashAttention-4, too, if it serves."""
        (context,) = self._micro_batches((1,), 1)
        q_THD, k_TGD, v_TGF = self._queries_keys_values(1)
        selection = self._select(q_THD, k_TGD, context)
        named = self._options.config.attention
        serves = named == "auto" and fa4_lists.obstacle(q_THD, v_TGF, selection) is None
        return ["fa4", "auto"] if serves else [named]

    @property
    def dense_kernels(self) -> list[DenseAttention]:
        """Who attends to whole documents: whom the config names, else those that serve."""
        chosen = self._options.config
        if chosen.dense_attention != "auto":
            return [chosen.dense_attention]
        q_THD, _, v_TGF = self._queries_keys_values(1)
        layout = packed_layout((0, 1), chosen.block_size, self._device)
        serves: dict[DenseAttention, bool] = {
            "fa4": dense_kernel(q_THD, v_TGF, layout, "fa4")[1] is None,
            "model": self._core_attention.own is not None,
        }
        return [*(name for name, does in serves.items() if does), "torch"]

    def timed(self, cell: Cell, kernel: Any = None) -> Timed:
        """A part on a micro-batch of random data, all samples at one budget; attention by one of
        :attr:`list_kernels` or :attr:`dense_kernels`."""
        (context,) = self._micro_batches(cell.lengths_tokens, cell.budget_blocks)
        tokens = context.layout.tokens
        match cell.part:
            case Part.ATTENTION:
                qkv = self._queries_keys_values(tokens)
                selection = self._select(qkv[0], qkv[1], context)
                by_lists = partial(block_sparse_attention, selection=selection)
                return self._attention(qkv, partial(by_lists, implementation=kernel))
            case Part.DENSE_ATTENTION:
                return self._dense_attention(context, kernel)
            case Part.ROUTER:
                q_THD, k_TGD, _ = self._queries_keys_values(tokens)
                return Timed(forward=lambda: self._select(q_THD, k_TGD, context), backward=None)
            case Part.LINEAR:
                return self._linear(tokens, context)
            case Part.EXPERTS:
                # The router of tokens, their way to the experts and back, and the experts.
                hidden_T1h = self._hidden(tokens)
                return with_backward(lambda: self._mlp(hidden_T1h)[0], hidden_T1h)
            case Part.EMBEDDING:
                tokens_1T = self._token_ids(tokens)
                places_1T = torch.arange(tokens, device=self._device)[None]
                positions_1T = places_1T % self._max_seqlen_tokens
                return with_backward(lambda: self._model.embedding(tokens_1T, positions_1T))
            case Part.HEAD:
                return self._head(tokens)

    def _micro_batches(
        self,
        lengths_tokens: Sequence[int],
        budget_blocks: int,
        segment_starts_blocks: tuple[int, ...] = (0,),
        slices: Sequence[SequenceSlice | None] = (None,),
    ) -> list[LocalMicroBatch]:
        plan = MicroBatchPlan(
            samples=tuple(range(len(lengths_tokens))),
            lengths_tokens=tuple(lengths_tokens),
            budgets_LS=np.full((1, len(lengths_tokens)), budget_blocks, dtype=np.int32),
            rank=0,
            position=0,
            segment_starts_blocks=segment_starts_blocks,
        )
        return local_micro_batches(
            *(plan, tuple(accumulate(lengths_tokens, initial=0)), slices),
            block_size=self._options.config.block_size,
            observe=True,
            device=self._device,
        )

    def _attention(
        self, qkv: tuple[Tensor, Tensor, Tensor], attend: Callable[..., tuple[Tensor, Tensor]]
    ) -> Timed:
        scale = qkv[0].shape[-1] ** -0.5
        return with_backward(lambda: attend(*qkv, softmax_scale=scale)[0], *qkv)

    def _dense_attention(self, context: LocalMicroBatch, kernel: DenseAttention) -> Timed:
        """As layers attend to documents that are covered: without lists, where that serves."""
        layout, lists = context.layout, self._options.config.attention
        qkv = self._queries_keys_values(layout.tokens)
        if kernel == "model":
            attend = self._core_attention.attended_by_model
            return self._attention(qkv, lambda *qkv, **_: (attend(qkv, layout, context), qkv[0]))
        if attends_densely(qkv[0], qkv[2], layout, lists, kernel):
            return self._attention(qkv, partial(dense_attention, layout=layout, kernel=kernel))
        layouts, groups = LayoutPair.within(layout), self._config.num_query_groups

        def by_lists(
            q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, *, softmax_scale: float
        ) -> tuple[Tensor, Tensor]:
            everything = Selection.of_everything(layouts, groups)
            return block_sparse_attention(
                *(q_THD, k_TGD, v_TGF, everything),
                softmax_scale=softmax_scale,
                implementation=lists,
            )

        return self._attention(qkv, by_lists)

    def attention_in_segments(self, tokens: int, budget_blocks: int, segments: int) -> Timed:
        """Selection and attention of a sample: forwards of segments in order, then backwards in
        reverse."""
        block_size = self._options.config.block_size
        blocks = -(-tokens // block_size)
        starts_blocks = tuple(blocks * segment // segments for segment in range(segments))
        slices = [
            segment_slice((0, tokens), starts_blocks, segment, block_size=block_size)
            if segments > 1
            else None
            for segment in range(segments)
        ]
        inputs = [
            self._queries_keys_values(tokens if held is None else len(held.tokens_T))
            for held in slices
        ]

        def forward() -> list[Tensor]:
            micro_batches = self._micro_batches((tokens,), budget_blocks, starts_blocks, slices)
            outputs = []
            for micro_batch, qkv in zip(micro_batches, inputs, strict=True):
                params = micro_batch.params()
                batched = qkv if micro_batch.sequence is None else [x[:, None] for x in qkv]
                outputs.append(self._core_attention(*batched, packed_seq_params=params))
            return outputs

        def backward(outputs: list[Tensor]) -> None:
            for output, qkv in zip(reversed(outputs), reversed(inputs), strict=True):
                torch.autograd.grad(output, qkv, torch.ones_like(output))

        return Timed(forward=forward, backward=backward)

    def _queries_keys_values(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_TGD, v_TGF = (
            self._random(tokens, *shape).requires_grad_() for shape in _head_shapes(self._config)
        )
        return q_THD, k_TGD, v_TGF

    def _linear(self, tokens: int, context: LocalMicroBatch) -> Timed:
        params = context.params()
        hidden_T1h = self._hidden(tokens)
        rotary = self._rotary(hidden_T1h, params)

        def layer() -> Tensor:
            out_T1h, _ = self._layer(
                hidden_states=hidden_T1h,
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=params,
            )
            return out_T1h

        return with_backward(layer, hidden_T1h)

    def _head(self, tokens: int) -> Timed:
        """Final norm, vocabulary projection and loss."""
        model = self._model
        hidden_T1h = self._hidden(tokens)
        labels_1T = self._token_ids(tokens)

        def head() -> Tensor:
            norm = model.decoder.final_layernorm
            normed_T1h = hidden_T1h if norm is None else norm(hidden_T1h)
            shared = model.share_embeddings_and_output_weights
            weight = model.shared_embedding_or_output_weight() if shared else None
            logits, _ = model.output_layer(normed_T1h, weight=weight)
            return model.compute_language_model_loss(labels_1T, logits).float().sum()

        return with_backward(head, hidden_T1h)

    def _rotary(self, hidden_T1h: Tensor, params: BudgetedPackedSeqParams) -> Any:
        embedding = getattr(self._model, "rotary_pos_emb", None)
        if embedding is None:
            return None
        length = embedding.get_rotary_seq_len(
            None, self._model.decoder, hidden_T1h, self._config, params
        )
        rotary = embedding(length, packed_seq=True)
        return rotary[0] if isinstance(rotary, tuple) else rotary

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._config.params_dtype, device=self._device)

    def _hidden(self, tokens: int) -> Tensor:
        hidden_T1h = self._random(tokens, 1, self._config.hidden_size)
        if self._config.fp32_residual_connection:
            hidden_T1h = hidden_T1h.float()
        return hidden_T1h.requires_grad_()

    def _token_ids(self, tokens: int) -> Tensor:
        return torch.randint(self._vocabulary, (1, tokens), device=self._device)


def _head_shapes(config: Any) -> tuple[tuple[int, int], ...]:
    """Heads and head dim of queries, keys and values."""
    key_dim, value_dim = head_dims(config)
    heads, groups = config.num_attention_heads, config.num_query_groups
    return (heads, key_dim), (groups, key_dim), (groups, value_dim)


class _ReturnQueries(torch.autograd.Function):
    """Queries, cut to the values' head dim, as attention's output; keys and values get zero
    gradients, so that what made them runs its backward."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor) -> Tensor:
        ctx.shapes = (q_THD.shape, k_TGD.shape, v_TGF.shape)
        return _of_head_dim(q_THD, v_TGF.shape[2]).flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_shape, k_shape, v_shape = ctx.shapes
        gradient_THF = gradient.view(*q_shape[:2], v_shape[2])
        zeros = gradient.new_zeros(k_shape), gradient.new_zeros(v_shape)
        return _of_head_dim(gradient_THF, q_shape[2]), *zeros


def _of_head_dim(x_THD: Tensor, head_dim: int) -> Tensor:
    missing = head_dim - x_THD.shape[2]
    return torch.nn.functional.pad(x_THD, (0, missing)) if missing else x_THD


class _PassQueries(torch.nn.Module):
    """Core attention that costs nothing."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Tensor:
        out = _ReturnQueries.apply(query, key, value)
        # Multi-latent attention takes a batch of one.
        return out if packed_seq_params.qkv_format == "thd" else out[:, None]


class _PassHidden(torch.nn.Module):
    """Experts that cost nothing."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def _build(args: Namespace, config: Any, options: AttentionOptions, device: torch.device) -> Any:
    spec = sparse_balance_layer_spec(options)(config, None)
    model = gpt_model(args, config, spec).to(device=device, dtype=config.params_dtype)
    if config.gradient_accumulation_fusion:
        for parameter in model.parameters():
            # Where Megatron's data-parallel wrapper would have the fused kernels accumulate.
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    return model.train()


def measured_exchanges(
    args: Namespace,
    choices: SparseBalanceConfig,
    ranks: int,
    *,
    device: torch.device,
    thoroughness: Thoroughness,
    clock: Clock,
) -> tuple[ExchangeRow, ...]:
    """Time the exchange of a layer between 2, 4, ... ranks, in both directions; collective.

    The world of these ranks, found as torchrun says, is started and ended here. A sequence is as
    slow as its slowest member. ``args`` are cut down to one rank's share of heads.
    """
    block_size = choices.block_size
    rows = []
    with data_parallel_world(device):
        groups = make_sequence_groups(ranks & -ranks, timeout_minutes=_TIMEOUT_MINUTES)
        config = transformer_config(args)
        for size, group in groups.by_size.items() if groups is not None else ():
            lengths = {max(size * block_size, args.seq_length // divisor) for divisor in _DIVISORS}
            for tokens in sorted(lengths if size > 1 else ()):
                timed = _exchange(config, group, tokens, block_size, device)
                rows += _timed_rows(timed, group, config, tokens, thoroughness, clock)
    return tuple(rows)


def _exchange(
    config: Any, group: SequenceGroup, tokens: int, block_size: int, device: torch.device
) -> Timed:
    """Forward and backward of a sequence of one document, without attention."""
    exchange = group.exchange
    assert exchange is not None, "a group of several members has an exchange"
    held = SequenceSlice.dealt((0, tokens), group, block_size=block_size, device=device)
    ones, tokens = partial(torch.ones, dtype=config.params_dtype, device=device), len(held.tokens_T)
    k_TGD, v_TGF = (ones(tokens, *shape) for shape in _head_shapes(config)[1:])
    given = k_TGD, v_TGF, Selection.of_documents(held.local_layout, held.whole_layout), held

    def forward() -> None:
        deque(exchange.parts(*given), maxlen=0)

    def backward(_: None) -> None:
        wide = wide_dtype(config.params_dtype)
        parts = (torch.cat(kv, 2).to(wide) for *kv, _ in exchange.parts(*given))
        exchange.gradient(parts, config.params_dtype, held)

    return Timed(forward=forward, backward=backward)


def _timed_rows(
    timed: Timed,
    group: SequenceGroup,
    config: Any,
    tokens: int,
    thoroughness: Thoroughness,
    clock: Clock,
) -> list[ExchangeRow]:
    # As often on all members: a clock would stop them at different repeats.
    runs_ms = []
    for _ in range(thoroughness.warm_up + thoroughness.most_repeats):
        dist.barrier(group.process_group)
        runs_ms.append(time_once(timed, clock))
    of_members: list[Any] = [None] * group.members
    dist.all_gather_object(of_members, runs_ms[thoroughness.warm_up :], group.process_group)
    slowest_ms = np.array(of_members).max(axis=0)
    cost = Exchange.of(model_shape(config, vocab_size=1), dtype_name(config))
    per_token = cost.bytes_per_token, cost.bytes_per_token + cost.gradient_bytes_per_token
    return [
        ExchangeRow(
            width=group.members,
            received_bytes=round(tokens * bytes_per_token * cost.received_share(group.members)),
            **median_and_spread(times_ms),
        )
        for bytes_per_token, times_ms in zip(per_token, slowest_ms.T, strict=True)
    ]
