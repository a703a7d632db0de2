# SPDX-License-Identifier: Apache-2.0
"""The entry point with a change, named by the first argument; the rest is the command line.

Start with ``--sparse-balance-device cpu``.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

import copy
import itertools
import math
import sys
import time
from dataclasses import replace
from typing import Any

from sparsebalance_megatron.megatron import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.training import get_args  # noqa: E402
from torch import Tensor  # noqa: E402

from sparsebalance_megatron.cost.model import CostModel  # noqa: E402
from sparsebalance_megatron.cost.parts import SegmentCost  # noqa: E402
from sparsebalance_megatron.megatron import core_attention  # noqa: E402
from sparsebalance_megatron.megatron.compat import default_layer_spec  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

SLEEP_S = 0.1
SLOW_RANK = 1
CALLS = []
"""Documents of every call of :class:`OwnAttention`."""


def mark_norms() -> None:
    """Layer norms that sequence parallelism can use.

    On a GPU they come from Transformer Engine or Apex. Megatron's wrapper around PyTorch's norms,
    all that there is on a CPU, refuses; what it lacks is the mark by which Megatron sums the
    gradients of their weights over tensor-parallel ranks.
    """
    make_norm = WrappedTorchNorm.__new__

    def make_marked_norm(cls: Any, config: Any, *arguments: Any, **keywords: Any) -> Any:
        unmarked = copy.copy(config)
        unmarked.sequence_parallel = False
        norm = make_norm(cls, unmarked, *arguments, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(make_marked_norm)


def count_experts() -> None:
    """Every step prints how many times a rank's routers chose an expert; norms are marked."""
    mark_norms()
    # The package has a function of this name, which hides the module.
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    update_bias = finalize._update_router_expert_bias

    def print_counts(model: list[Any], *others: Any, **keywords: Any) -> Any:
        routers = [x for chunk in model for x in chunk.modules() if isinstance(x, TopKRouter)]
        print("experts chosen:", int(sum(each.local_tokens_per_expert.sum() for each in routers)))
        return update_bias(model, *others, **keywords)

    finalize._update_router_expert_bias = print_counts


def slow_down_a_rank() -> None:
    """Rank 1 sleeps in every layer before it attends."""
    attend = TransformerLayer._forward_attention

    def slow(*arguments: Any, **keywords: Any) -> Any:
        if torch.distributed.get_rank() == SLOW_RANK:
            time.sleep(SLEEP_S)
        return attend(*arguments, **keywords)

    TransformerLayer._forward_attention = slow


def make_segments_free() -> None:
    """Counted costs in which segments cost nothing, so that plans have some.

    Counted operations of a tiny model take microseconds, less than what an operation is assumed to
    cost.
    """
    analytic = CostModel.analytic

    def with_free_segments(*arguments: Any, **keywords: Any) -> CostModel:
        free = SegmentCost(slowness=1.0, operation_ms=(0.0, 0.0))
        return replace(analytic(*arguments, **keywords), segments=free)

    CostModel.analytic = with_free_segments  # type: ignore[method-assign, assignment]


class OwnAttention(MegatronModule):
    """Causal attention within the documents of plain packed-sequence parameters.

    Which weights dropout drops follows from the head and from places in the document. Ranks divide
    nothing but a sequence then.
    """

    dropped = 0.0

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params.qkv_format == "thd"
        # As on a model of its heads, whose sequence lies on this rank alone.
        heads = self.config.num_attention_heads, self.config.num_query_groups
        heads_here = [each // self.config.tensor_model_parallel_size for each in heads]
        assert [q_THD.shape[1], k_TGD.shape[1]] == heads_here
        assert len(q_THD) == packed_seq_params.cu_seqlens_q[-1]
        assert packed_seq_params.cp_group is None and self.config.context_parallel_size == 1
        parts = []
        for start, end in itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
            how = {"is_causal": True, "scale": self._scale, "enable_gqa": True}
            if self.training and self.dropped:
                ones = torch.eye(end - start).expand(1, k.shape[1], -1, -1)
                weights = torch.nn.functional.scaled_dot_product_attention(q, k, ones, **how)
                group = q.shape[1] // k.shape[1]
                out = weights * self._kept(*weights.shape[1:3]) @ v.repeat_interleave(group, 1)
            else:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
            parts.append(out[0].transpose(0, 1).flatten(1))
        CALLS.append(len(parts))
        return torch.cat(parts)

    def _kept(self, heads: int, tokens: int) -> Tensor:
        """[H, T, T] factors of the weights of heads of this rank."""
        members = get_args().num_attention_heads // heads
        first = torch.distributed.get_rank() % members * heads
        kept = [
            torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(head))
            >= self.dropped
            for head in range(first, first + heads)
        ]
        return torch.stack(kept) / (1.0 - self.dropped)


def take_own_attention() -> None:
    """Megatron's layers have an attention that takes packed sequences, as Transformer Engine's
    does. How often it ran is printed at the end. Norms are marked."""
    mark_norms()

    def own_layer_spec(*given: Any) -> Any:
        spec = default_layer_spec(*given)
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.submodules.core_attention = OwnAttention
        return spec

    core_attention.default_layer_spec = own_layer_spec


def take_own_attention_with_dropout() -> None:
    OwnAttention.dropped = 0.2
    take_own_attention()


CHANGES = {
    "marked-norms": mark_norms,
    "counted-experts": count_experts,
    "slow-rank": slow_down_a_rank,
    "free-segments": make_segments_free,
    "own-attention": take_own_attention,
    "own-dropout": take_own_attention_with_dropout,
}

if __name__ == "__main__":
    CHANGES[sys.argv.pop(1)]()
    main()
    if CALLS:
        print(f"own attention ran {len(CALLS)} times", flush=True)
