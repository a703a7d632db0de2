# SPDX-License-Identifier: Apache-2.0
"""Megatron's core attention, replaced: route, select, attend; and specs of layers with it.

Shape legend: H query heads and G KV heads of this tensor-parallel rank, K budgets, s sequence, b
batch, T tokens that an operation computes.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    attends_densely,
    block_sparse_attention,
    dense_attention,
    dense_kernel,
)
from sparsebalance_megatron.attention.device import copied_to, undisturbed
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.repetitions import Repetitions
from sparsebalance_megatron.attention.select import Selector, rank_sequence, selector_named
from sparsebalance_megatron.attention.select.ranking import coverage_at
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.exchange import rank_slice, sequence_attention
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_with
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets, dense_up_to_blocks
from sparsebalance_megatron.megatron.compat import default_layer_spec
from sparsebalance_megatron.megatron.hooks import TruePositions
from sparsebalance_megatron.megatron.own_attention import sharing_heads
from sparsebalance_megatron.megatron.packed_seq_params import (
    BASE,
    EXECUTED,
    LayoutCache,
    LocalMicroBatch,
)
from sparsebalance_megatron.megatron.unsupported import check_replaced_attention

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass(eq=False)
class AttentionOptions:
    """Options of all layers of one model; coverage is observed at the budgets in ``grid``.

    ``config``: a checkpoint that is loaded may change up to which length documents are dense.
    ``leaves_attention``: whether layers keep an attention of their own that takes packed sequences;
    ``shares``: whether ranks may share these.
    ``repetitions``: adds up a model's attention to far repetitions; None where nobody asks.
    """

    config: SparseBalanceConfig
    grid: tuple[int, ...]
    layouts: LayoutCache = field(default_factory=LayoutCache, repr=False)
    repetitions: Repetitions | None = None
    leaves_attention: bool = False
    shares: bool = False

    @cached_property
    def selector(self) -> Selector[Any, Any]:
        """Chooses blocks."""
        return selector_named(self.config.selection, self.config.router, self.config.first_blocks)


class BudgetedCoreAttention(MegatronModule):
    """Block-sparse causal attention under the budgets that travel with the micro-batch.

    Takes the keyword constructor and the forward of Megatron's ``DotProductAttention``, and has its
    parameter, the attention sink ``softmax_offset`` [H] of ``--softmax-type learnable``; coverage
    and selection do not count the sink. ``own`` builds the attention that the model would have,
    which attends to dense documents where :meth:`attends_by_model`. Without a carrier (plain
    ``PackedSeqParams``, or the sbhd layout) every sample gets the base budget, nothing is observed,
    and the host waits for boundaries on the device, once a micro-batch.
    """

    own: Any

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        options: AttentionOptions,
        own: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ConfigError(f"--sparse-balance: {attention_type} attention is not supported")
        if options.config.leaves_attention:
            # The model's own would have had them, but takes no packed sequences, or heads of it
            # cannot travel.
            check_replaced_attention(config, options.config)
        self._layer_index = layer_number - 1
        self._options, chosen = options, options.config
        base_L = base_budgets(chosen.base_budget, chosen.layer_budgets, config.num_layers)
        self._base_budget = base_L[self._layer_index]
        # Query-key layer scaling needs nothing: Megatron divides scores by the layer's number, for
        # fp16's sake, and multiplies them back inside the softmax.
        self._softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._observed_at_K: Tensor | None = None
        self.tp_group = getattr(pg_collection, "tp", None)
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            on_cpu = config.use_cpu_initialization
            device = "cpu" if on_cpu else torch.cuda.current_device()
            sink_H = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = torch.nn.Parameter(sink_H)
            # Every rank's heads count in the norm of the gradient.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

        if chosen.dense_attention == "model" and (own is None or config.softmax_type != "vanilla"):
            raise ConfigError(
                f"{flag_with('dense_attention', 'model')}: needs --transformer-impl "
                "transformer_engine, and --softmax-type vanilla; use auto"
            )
        # Outside of the module tree: checkpoints keep their keys.
        self.__dict__["own"] = None
        if own is not None and chosen.model_may_attend and config.softmax_type == "vanilla":
            given = {
                "attention_dropout": attention_dropout,
                "softmax_scale": softmax_scale,
                "cp_comm_type": cp_comm_type,
                "pg_collection": pg_collection,
                "k_channels": k_channels,
                "v_channels": v_channels,
            }
            self.__dict__["own"] = build_module(
                sharing_heads(own),
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                **{name: value for name, value in given.items() if value is not None},
            )

    sharded_state_dict = DotProductAttention.sharded_state_dict

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, H, D] with packed parameters in the thd layout, else [s, b, H, D]; of
                multi-latent attention [T, H, D] with any packed parameters.
            key, value: likewise with G heads; values have a head dim F of their own.
            attention_mask: ignored; the mask is causal within each sample.

        Returns:
            [T, H * F] with packed parameters in the thd layout, else [s, b, H * F].
        """
        if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
            raise ConfigError(f"--sparse-balance: attention mask {attn_mask_type} is not causal")
        if attention_bias is not None:
            raise ConfigError("--sparse-balance: attention bias is not supported")
        context = getattr(packed_seq_params, "micro_batch", None)
        thd = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if context is None:
            if not thd:
                return self._batched(query, key, value)
            boundaries = self._options.layouts.boundaries_of(packed_seq_params.cu_seqlens_q)
            context = self._base_context(boundaries, query.device)
        padding = 0 if context.sequence is None else context.sequence.padding_tokens
        tokens = query.shape[0] - padding
        q_THD, k_TGD, v_TGF = (
            (x if x.ndim == 3 else x[:, 0])[:tokens] for x in (query, key, value)
        )
        if context.sequence is not None and context.sequence.has_whole_documents:
            of_member = partial(self._attend, context=context.of_member)
            travelling = context.travelling(context.layout.tokens)
            out_T = travelling.attend((q_THD, k_TGD, v_TGF), of_member).flatten(1)
        else:
            out_T = self._attend(q_THD, k_TGD, v_TGF, context)
        if padding:
            out_T = torch.nn.functional.pad(out_T, (0, 0, 0, padding))
        return out_T if thd else out_T[:, None]

    def _batched(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequence, batch = query.shape[:2]
        q_THD, k_TGD, v_TGF = (
            x.transpose(0, 1).reshape(batch * sequence, x.shape[2], -1) for x in (query, key, value)
        )
        cu_seqlens = tuple(range(0, (batch + 1) * sequence, sequence))
        out = self._attend(q_THD, k_TGD, v_TGF, self._base_context(cu_seqlens, query.device))
        return out.view(batch, sequence, -1).transpose(0, 1).contiguous()

    def _base_context(self, cu_seqlens: tuple[int, ...], device: torch.device) -> LocalMicroBatch:
        chosen, layers = self._options.config, self._layer_index + 1
        layout = self._options.layouts.layout(cu_seqlens, chosen.block_size, device)
        blocks_S = layout.grid.blocks_S
        budget_S = np.where(blocks_S <= self._dense_blocks, blocks_S, self._base_budget)
        budgets_LS = np.broadcast_to(budget_S.astype(np.int32), (layers, len(budget_S)))
        sparse_S = np.append(blocks_S > self._dense_blocks, True)
        return LocalMicroBatch(
            layout=layout,
            budgets_LS=copied_to(torch.from_numpy(budgets_LS.copy()), device),
            max_budgets=(int(budget_S.max()),) * layers,
            observe=False,
            dense_documents_L=(int(sparse_S.argmax()),) * layers,
        )

    def _attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, context: LocalMicroBatch
    ) -> Tensor:
        if self._options.repetitions is not None:
            rank = 0 if self.tp_group is None else self.tp_group.rank()
            self._options.repetitions.add(
                *(self._layer_index, q_THD, k_TGD, context.layout),
                softmax_scale=self._softmax_scale,
                first_head=rank * q_THD.shape[1],
            )
        dense: Sequence[Tensor] = (q_THD, k_TGD, v_TGF)
        layout, others, listed = context.layout, context, dense
        results: list[Tensor] = []
        documents = self._dense_documents(q_THD, v_TGF, context)
        in_pieces = documents if self._in_pieces(context, documents) else 0
        documents -= in_pieces
        if 0 < documents < layout.documents:
            layout, others = layout.split(documents)[0], context.without(documents)
            # Their tokens come first, and a split is a view.
            rest = others.layout.tokens
            if others.sequence is not None:
                rest = len(others.sequence.tokens_T)
            halves = [x.split((len(q_THD) - rest, rest)) for x in dense]
            dense, listed = zip(*halves, strict=True)
        if documents:
            results.append(self._attend_densely(dense, layout, context))
        if documents < context.layout.documents:
            results.append(self._attend_to_lists(listed, others, in_pieces))
        if documents:
            self._observe_densely(dense, layout, context, others)
        out_THF = torch.cat(results) if len(results) > 1 else results[0]
        return out_THF.reshape(out_THF.shape[0], -1)

    @property
    def _dense_blocks(self) -> int:
        """The longest document that this layer attends to densely where no plan says which."""
        chosen = self._options.config
        return dense_up_to_blocks(
            *(self._base_budget, chosen.base_budget, chosen.dense_up_to_tokens, chosen.block_size)
        )

    def _dense_documents(self, q_THD: Tensor, v_TGF: Tensor, context: LocalMicroBatch) -> int:
        """Number of first documents that are attended to densely, without lists."""
        planned = context.dense_documents(self._layer_index)
        documents = min(planned, context.layout.documents)
        chosen = self._options.config
        served = chosen.attention, chosen.dense_attention
        if documents and attends_densely(q_THD, v_TGF, context.layout, *served):
            return documents
        return 0

    @staticmethod
    def _in_pieces(context: LocalMicroBatch, documents: int) -> bool:
        """Whether so many dense documents are attended to in pieces, by keys and values that are
        exchanged: in segments, where heads do not travel, and where a rank would have nothing of
        the others."""
        sequence = context.sequence
        if sequence is None:
            return False
        if sequence.ranks is not None or not sequence.group.shares_heads:
            return True
        return documents < context.layout.documents and not sequence.leaves_to_all(documents)

    def _attend_densely(
        self, qkv: Sequence[Tensor], layout: PackedLayout, context: LocalMicroBatch
    ) -> Tensor:
        """out_THF of the documents of a layout."""
        if context.sequence is not None:
            return context.travelling(layout.tokens).attend(
                qkv, lambda *qkv: self._attend_densely(qkv, layout, context.of_member)
            )
        if self.attends_by_model(qkv[0], qkv[2], layout):
            return self.attended_by_model(qkv, layout, context)
        kernel = self._options.config.dense_attention
        return self._attended(partial(dense_attention, layout=layout, kernel=kernel), qkv, context)

    def attends_by_model(self, q_THD: Tensor, v_TGF: Tensor, layout: PackedLayout) -> bool:
        """Whether dense documents in one piece run on the model's own attention: where it is named,
        or FlashAttention-4 does not serve."""
        if self.own is None:
            return False
        named = self._options.config.dense_attention == "model"
        return named or dense_kernel(q_THD, v_TGF, layout, "fa4")[1] is not None

    def attended_by_model(
        self, qkv: Sequence[Tensor], layout: PackedLayout, context: LocalMicroBatch
    ) -> Tensor:
        """out_THF of the first documents, of a layout, by the model's own attention."""
        out_TX = self.own.train(self.training).of_documents(*qkv, context=context, layout=layout)
        return out_TX.view(len(out_TX), qkv[0].shape[1], -1)

    def _attend_to_lists(
        self, qkv: Sequence[Tensor], context: LocalMicroBatch, in_pieces: int
    ) -> Tensor:
        """out_THF by lists.

        ``in_pieces``: so many first documents are attended to densely. If all of the micro-batch's
        are, nothing is selected.
        """
        with undisturbed(qkv[0].device):
            selection = self.select(qkv[0], qkv[1], context, in_pieces)
        attend: Callable[..., tuple[Tensor, Tensor]] = block_sparse_attention
        if context.sequence is not None:
            exchange = context.exchange(self._layer_index)
            attend = partial(
                sequence_attention,
                sequence=context.sequence,
                exchange=exchange,
                dense_documents=in_pieces,
                dense_kernel=self._options.config.dense_attention,
            )
        implementation = self._options.config.attention
        attend = partial(attend, selection=selection, implementation=implementation)
        return self._attended(attend, qkv, context)

    def _attended(
        self,
        attend: Callable[..., tuple[Tensor, Tensor]],
        qkv: Sequence[Tensor],
        context: LocalMicroBatch,
    ) -> Tensor:
        """out_THF from queries, keys and values of the micro-batch's heads."""
        q_THD, k_TGD, v_TGF = qkv
        # The score of the key, of value 0, that --softmax-type adds to the keys of each head.
        sink_H: Tensor | None = None
        if self.config.softmax_type == "learnable":
            group = context.heads_of
            sink_H = self.softmax_offset.chunk(group.members)[group.member]
        elif self.config.softmax_type != "vanilla":
            sink_H = q_THD.new_zeros(q_THD.shape[1])
        out_THF, _ = attend(q_THD, k_TGD, v_TGF, softmax_scale=self._softmax_scale, sink_H=sink_H)
        return out_THF

    @torch.no_grad()
    def _observe_densely(
        self,
        qkv: Sequence[Tensor],
        layout: PackedLayout,
        context: LocalMicroBatch,
        others: LocalMicroBatch,
    ) -> None:
        """Note that the first documents are attended to densely, and what was seen of the others,
        if there are any besides those of ``context``.

        Where all documents are to be observed, these are routed for their curves.
        """
        if not context.observe:
            return
        # A dense layer covers everything at any budget.
        unseen = 1.0 if self._base_budget == DENSE else torch.nan
        shape = layout.documents, len(self._options.grid) + 2
        seen_SK = torch.full(shape, unseen, device=qkv[0].device)
        if context.observes_all and context.sequence is None and self._base_budget != DENSE:
            with undisturbed(seen_SK.device):
                ranking = rank_sequence(
                    *(self._options.selector, qkv[0], qkv[1], layout),
                    softmax_scale=self._softmax_scale,
                    max_budget=1,
                    observe=True,
                )
            seen_SK = self._coverage(ranking, context.budgets_LS[self._layer_index][: len(seen_SK)])
        seen_SK[:, EXECUTED].fill_(1.0)
        self._cover_at_base(seen_SK, layout)
        if others is not context:
            seen_SK = torch.cat((seen_SK, others.observations[self._layer_index]))
        context.observations[self._layer_index] = seen_SK

    @torch.no_grad()
    def select(
        self, q_THD: Tensor, k_TGD: Tensor, context: LocalMicroBatch, in_pieces: int = 0
    ) -> Selection:
        """The blocks that this rank's queries read; see :meth:`_attend_to_lists`."""
        options, sequence = self._options, context.sequence
        if self._reads_everything(context, in_pieces):
            self._observe_densely((q_THD, k_TGD), context.layout, context, context)
            layouts = LayoutPair.within(context.layout) if sequence is None else sequence.layouts
            if in_pieces:
                return Selection.of_documents(layouts.query_layout, layouts.kv_layout)
            return Selection.of_everything(layouts, k_TGD.shape[1])
        budgets_S = context.budgets_LS[self._layer_index]
        rank: Callable[..., Any] = partial(rank_sequence, layout=context.layout)
        if sequence is not None:
            exchange = context.exchange(self._layer_index)
            rank = partial(rank_slice, sequence=sequence, exchange=exchange)
        ranking = rank(
            options.selector,
            q_THD,
            k_TGD,
            softmax_scale=self._softmax_scale,
            max_budget=context.max_budgets[self._layer_index],
            observe=context.observe,
        )
        if context.observe:
            self.observe(ranking, budgets_S, context)
        return options.selector.select(ranking, budgets_S)

    def _reads_everything(self, context: LocalMicroBatch, in_pieces: int) -> bool:
        """Whether nothing is ranked: dense attention to all documents is planned, and runs in
        pieces, or by lists of all blocks where it does not serve."""
        if (
            not in_pieces
            and self._base_budget != DENSE
            and self._options.config.attention == "tokens"
        ):
            return False
        return context.is_dense(self._layer_index)

    def observe(self, ranking: Any, budgets_S: Tensor, context: LocalMicroBatch) -> None:
        """Note the coverage of the budgets [S] that are executed, of base budgets and the grid."""
        seen_SK = self._coverage(ranking, budgets_S)
        self._cover_at_base(seen_SK, context.layout)
        context.observations[self._layer_index] = seen_SK

    def _coverage(self, ranking: Any, budgets_S: Tensor) -> Tensor:
        """[S, K + 2] coverage that documents have at the grid's budgets, their base budget, and the
        one that is given; of the heads of all tensor-parallel ranks."""
        curves_SK = self._mean_over_tensor_parallel(self._options.selector.coverage(ranking))
        budgets_SK = torch.cat((self._grid_and_base_on(curves_SK), budgets_S[:, None]), dim=1)
        return coverage_at(curves_SK, budgets_SK)

    def _cover_at_base(self, seen_SK: Tensor, layout: PackedLayout) -> None:
        """Set base coverage to 1 where documents are attended to densely at the base budget."""
        is_short_S = layout.grid.blocks_S <= self._dense_blocks
        if is_short_S.any():
            short_S = copied_to(torch.from_numpy(is_short_S), seen_SK.device)
            seen_SK[:, BASE].masked_fill_(short_S, 1.0)

    def _grid_and_base_on(self, curves_SK: Tensor) -> Tensor:
        """[S, K + 1] budgets of the grid, then the base budget; copied to the device once."""
        if self._observed_at_K is None or self._observed_at_K.device != curves_SK.device:
            budgets = (*self._options.grid, self._base_budget)
            host_K = torch.tensor(budgets, dtype=torch.int32)
            self._observed_at_K = copied_to(host_K, curves_SK.device)
        return self._observed_at_K.expand(curves_SK.shape[0], -1)

    def _mean_over_tensor_parallel(self, curves_SK: Tensor) -> Tensor:
        """Heads are spread over ranks, budgets are not: every rank must see the same coverage."""
        group = self.tp_group
        if group is None or torch.distributed.get_world_size(group) == 1:
            return curves_SK
        curves_SK = curves_SK.contiguous()
        torch.distributed.all_reduce(curves_SK, group=group)
        return curves_SK / torch.distributed.get_world_size(group)


def sparse_balance_layer_spec(options: AttentionOptions) -> Callable[[Any, int | None], Any]:
    """A spec function ``(transformer_config, vp_stage) -> ModuleSpec or block submodules``."""

    def spec(transformer_config: Any, vp_stage: int | None = None) -> Any:
        return replace_core_attention(default_layer_spec(transformer_config, vp_stage), options)

    return spec


def _takes_packed_sequences(core_attention: Any) -> bool:
    """Whether a builder of core attention is not of Megatron's local one, which takes none."""
    module = getattr(core_attention, "module", core_attention)
    return not (isinstance(module, type) and issubclass(module, DotProductAttention))


def replace_core_attention(spec: Any, options: AttentionOptions) -> Any:
    """A copy of ``spec``, of a transformer layer or ``TransformerBlockSubmodules``, whose
    self-attention layers use :class:`BudgetedCoreAttention`.

    Where options leave attention to the model, layers keep theirs if it takes packed sequences.

    Raises:
        ConfigError: if a layer has no replaceable core attention.
    """
    spec = copy.deepcopy(spec)
    layers = getattr(spec, "layer_specs", None) or [spec]
    # Layers may have one spec in common.
    for layer in {id(layer.submodules): layer for layer in layers}.values():
        self_attention: Any = getattr(layer.submodules, "self_attention", None)
        submodules = getattr(self_attention, "submodules", None)
        if submodules is None or not hasattr(submodules, "core_attention"):
            raise ConfigError(
                f"--sparse-balance: {layer.module.__name__} has no core attention to replace; "
                "use plain, grouped-query or multi-latent attention layers"
            )
        leaves = options.leaves_attention and _takes_packed_sequences(submodules.core_attention)
        if leaves and not options.shares:
            continue
        if issubclass(self_attention.module, MLASelfAttention):
            own = self_attention.module
            self_attention.module = type(own.__name__, (TruePositions, own), {})
        if leaves:
            submodules.core_attention = sharing_heads(submodules.core_attention)
            continue
        own = submodules.core_attention
        takes = _takes_packed_sequences(own)
        submodules.core_attention = ModuleSpec(
            module=BudgetedCoreAttention,
            params={"options": options, "own": own if takes else None},
        )
    return spec
