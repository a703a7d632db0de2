# SPDX-License-Identifier: Apache-2.0
"""What a forward step asks of Megatron: true positions, counted sequences, validated losses.

Loads no ``megatron.training``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from sparsebalance_megatron.megatron.compat import update_sequence_statistics
from sparsebalance_megatron.megatron.packed_seq_params import BudgetedPackedSeqParams

_MARK = "_sparse_balance_true_positions"


def use_true_positions(model: Any) -> None:
    """Have a GPT model's decoder rotate by the true positions of this rank's tokens; idempotent.

    Megatron makes one table of rotary embeddings per forward pass and hands it to the decoder;
    attention applies row i of it to token i. A hook in front of the decoder puts the rows of this
    rank's tokens in its place.

    Args:
        model: one chunk, wrapped by Megatron or not.
    """
    decoder = unwrap_model(model).decoder
    if not getattr(decoder, _MARK, False):
        decoder.register_forward_pre_hook(_hand_over_rows, with_kwargs=True)
        setattr(decoder, _MARK, True)


def _hand_over_rows(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = getattr(kwargs.get("packed_seq_params"), "micro_batch", None)
    table = kwargs.get("rotary_pos_emb")
    if context is None or context.sequence is None or table is None:
        return args, kwargs
    rows = table.index_select(0, context.sequence.positions_T)
    return args, {**kwargs, "rotary_pos_emb": rows}


def model_config_of(model: Any) -> Any:
    """The ``TransformerConfig`` of a model chunk, wrapped by Megatron or not."""
    return get_model_config(model)


def count_sequences(packed: BudgetedPackedSeqParams) -> None:
    """Have Megatron's FLOP count see a sequence once, however many ranks share it.

    It divides by the context-parallel size, as if each of those ranks had counted every sequence.
    Padding is left out: useful work is counted.
    """
    micro_batch = packed.micro_batch
    cu_seqlens, sequence = packed.cu_seqlens_q, None
    if micro_batch is not None:
        cu_seqlens = cu_seqlens[: len(cu_seqlens) - micro_batch.padding_documents]
        sequence = micro_batch.sequence
    if sequence is None:
        update_sequence_statistics(cu_seqlens)
        return
    counts = micro_batch is not None and micro_batch.counts
    times = parallel_state.get_context_parallel_world_size() if counts else 0
    update_sequence_statistics(cu_seqlens, times=times)


def validate_loss(loss: Tensor) -> None:
    """Hand a loss to Megatron's re-run machinery, which decides what NaN and Inf mean."""
    for test, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=test,
            message=f"found {what} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
