# SPDX-License-Identifier: Apache-2.0
"""Hooks in Megatron's config and model, and helpers of forward steps; loads no
``megatron.training`` by itself.

Shape legend: T tokens that a rank computes, E experts.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config as get_model_config
from megatron.core.utils import unwrap_model
from torch import Tensor

from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.megatron.timing import (
    FORWARD_TIMER,
    MicroBatchRecorder,
    NoTimers,
    RecordingTimers,
)

_TRUE_POSITIONS, _MASKED, _REPORTS = (
    f"_sparse_balance_{name}" for name in ("true_positions", "masked", "reports")
)


def use_true_positions(model: Any) -> None:
    """Have a GPT model's decoder rotate by the true positions of this rank's tokens; idempotent.

    Attention applies line i of a table that the model hands to the decoder to token i. A hook puts
    the lines of this rank's tokens in its place.
    """
    decoder = unwrap_model(model).decoder
    if not getattr(decoder, _TRUE_POSITIONS, False):
        decoder.register_forward_pre_hook(_hand_over_positions, with_kwargs=True)
        setattr(decoder, _TRUE_POSITIONS, True)


def _hand_over_positions(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = getattr(kwargs.get("packed_seq_params"), "micro_batch", None)
    table = kwargs.get("rotary_pos_emb")
    if context is None or context.sequence is None or table is None:
        return args, kwargs
    of_tokens = table.index_select(0, context.sequence.positions_T)
    return args, {**kwargs, "rotary_pos_emb": of_tokens}


class TruePositions:
    """Mixed into Megatron's multi-latent attention: rotates by the true positions of tokens.

    Other attention gets its table of rotary embeddings from the model; this one makes it in every
    layer, for one sequence from position 0. A packed sequence with a plan passes in the sbhd
    layout, with a batch of one: line i of the table then belongs to token i, values keep their head
    dim, and no boundary is read from the device. Other inputs pass as they are.
    """

    rotary_pos_emb: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._position_T: Tensor | None = None
        self.rotary_pos_emb.register_forward_pre_hook(self._uncut, with_kwargs=True)
        self.rotary_pos_emb.register_forward_hook(self._lines_of_tokens)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        packed: Any = keywords.get("packed_seq_params")
        context: LocalMicroBatch | None = getattr(packed, "micro_batch", None)
        self._position_T = None
        if context is not None:
            sequence = context.sequence
            self._position_T = (
                context.layout.position_T if sequence is None else sequence.positions_T
            )
            packed = copy.copy(packed)
            packed.qkv_format = "sbhd"
        keywords["packed_seq_params"] = packed
        return super().forward(*arguments, **keywords)  # type: ignore[misc]

    def _uncut(self, _: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Ask for the lines of the whole sequence, where Megatron would cut them by rank."""
        if self._position_T is not None:
            keywords = {**keywords, "packed_seq": True}
        return arguments, keywords

    def _lines_of_tokens(self, _: Any, __: Any, table: Any) -> Any:
        """Give the line of each token, [T, 1, rotary dim]; YaRN's table comes with a scale."""
        if self._position_T is None:
            return table
        lines, *scale = table if isinstance(table, tuple) else (table,)
        of_tokens = lines[:, 0].index_select(0, self._position_T)
        return (of_tokens, *scale) if scale else of_tokens


def leave_out_padding(model: Any) -> None:
    """Have a model chunk's routers count no padding, in expert bias and balancing losses;
    idempotent. Megatron's quantile balancing takes no mask and counts all."""
    if getattr(model, _MASKED, False):
        return
    for block in [each for each in model.modules() if isinstance(each, TransformerBlock)]:
        routers = [each for each in block.modules() if isinstance(each, TopKRouter)]
        if routers and all(each.routing_type != "quantile_balancing" for each in routers):
            block.register_forward_pre_hook(_hand_over_mask, with_kwargs=True)
            for router in routers:
                router._apply_expert_bias = _masking(router._apply_expert_bias)
    setattr(model, _MASKED, True)


def _hand_over_mask(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    micro_batch = getattr(kwargs.get("packed_seq_params"), "micro_batch", None)
    padding_T = None if micro_batch is None else micro_batch.padding_T()
    if padding_T is None or kwargs.get("padding_mask") is not None:
        return args, kwargs
    if block.config.sequence_parallel:
        padding_T = scatter_to_sequence_parallel_region(padding_T)
    return args, {**kwargs, "padding_mask": padding_T[None]}


def _masking(count: Callable[..., None]) -> Callable[..., None]:
    """A router's counting of tokens by expert, without padding.

    megatron-core 0.19.2 cannot mask [T, E] by [T] itself.
    """

    def count_tokens(routing_map_TE: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
        count(routing_map_TE)

    return count_tokens


def packed_forward_step(
    check_for_nan: bool, data_iterator: Iterator[dict[str, Any]], model: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """The forward step of ``megatron.training``; ``check_for_nan`` asks Megatron's re-run
    machinery."""
    batch = next(data_iterator)
    packed = batch["packed_seq_params"]
    count_sequences(packed.cu_seqlens_q, packed.micro_batch)
    output = model(
        *(batch["tokens"], batch["position_ids"], None),
        labels=batch["labels"],
        packed_seq_params=packed,
    )
    return output, partial(token_loss, batch["loss_mask"], check_for_nan)


def count_sequences(cu_seqlens: Tensor, micro_batch: LocalMicroBatch) -> None:
    """Have Megatron's FLOP count see a sequence once, without padding, however many ranks share it.

    It divides by the context-parallel size, as if each of those ranks had counted every sequence.
    Every rank feeds something, 0 where another one counts, or it would leave out the collective
    that adds up.
    """
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    cu_seqlens = cu_seqlens[: len(cu_seqlens) - micro_batch.padding_documents]
    times = 1
    if micro_batch.sequence is not None:
        times = parallel_state.get_context_parallel_world_size() * micro_batch.counts
    update_seqlen_stats_from_cu_seqlens(cu_seqlens if times else cu_seqlens * 0)
    for _ in range(times - 1):
        update_seqlen_stats_from_cu_seqlens(cu_seqlens)


_NO_TOKENS = 1e-30
"""Stands for a count of 0; a count of 1 token, in float32, does not change by it."""


def token_loss(
    loss_mask: Tensor, check_for_nan: bool, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of token losses, token count, and what Megatron reports of a GPT's output.

    Megatron divides the sums that all micro-batches report. Where none has a trained token the
    count is next to nothing, so that the step's loss is 0 and no NaN removes its log interval.
    ``check_for_nan`` asks its re-run machinery what NaN and Inf mean.
    """
    mask_T = loss_mask.reshape(-1).float()
    loss = (output.reshape(-1).float() * mask_T).sum()
    tokens = mask_T.sum().to(torch.int)
    for test, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")) if check_for_nan else ():
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=test,
            message=f"found {what} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    count = tokens.detach().float().clamp(min=_NO_TOKENS)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), count])}


def install_hooks(
    model_config: Any, recorder: MicroBatchRecorder, after_finalize: Callable[[], object]
) -> None:
    """Watch ``timers`` and ``finalize_model_grads_func``, unless they are watched already.

    It is called in every forward step, because Megatron's loop resets both attributes.
    ``finalize_model_grads_func`` is the one place that every rank passes once per step; here it
    also divides sharded gradients, see :func:`divide_by_tokens`. ``after_finalize`` is called when
    gradients are final.
    """
    if not isinstance(model_config.timers, RecordingTimers):
        model_config.timers = RecordingTimers(model_config.timers or NoTimers(), recorder)
        # The forward that brought us here began before its timer could be watched.
        recorder.start(FORWARD_TIMER)
    finalize = model_config.finalize_model_grads_func
    if finalize is None or hasattr(finalize, _REPORTS):
        return

    def finalize_and_report(model: Any, num_tokens: Any = None, *others: Any, **named: Any) -> Any:
        recorder.end_schedule()
        result = finalize(model, num_tokens, *others, **named)
        divide_by_tokens(model, num_tokens)
        after_finalize()
        return result

    setattr(finalize_and_report, _REPORTS, True)
    model_config.finalize_model_grads_func = finalize_and_report


def divide_by_tokens(model: Sequence[Any], tokens: Tensor | None) -> None:
    """Divide sharded gradients by the tokens of a step, which Megatron leaves out.

    With per-token loss, ``finalize_model_grads`` asks every model chunk to divide, and a chunk with
    FSDP2 does nothing (megatron-core 0.19.2). Chunks of a Megatron that divides are left alone.
    ``tokens`` has been added up over ranks; None without per-token loss.
    """
    for chunk in model:
        if (
            tokens is None
            or not isinstance(chunk, TorchFullyShardedDataParallel)
            or type(chunk).scale_gradients is not _BaseDataParallel.scale_gradients
        ):
            continue
        scale = chunk.process_group.size() / tokens.clamp(min=1)
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(scale)
