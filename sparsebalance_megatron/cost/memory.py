# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of a pipeline stage by counting tensors: weights with gradients and Adam's
state, activations of the micro-batches in flight, and the lists of selected blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sparsebalance_megatron.cost.table import ModelShape

GIBIBYTE = 2.0**30
NOT_COUNTED = "fragmentation, CUDA context, NCCL buffers, library workspaces"
_HALF, _FLOAT = 2, 4
"""Bytes of a number in bfloat16 and in float32."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Sizes and flags that decide the memory of a GPT in bfloat16 with RMSNorm, as in Megatron.

    Attributes:
        optimizer_ranks: over which ``--use-distributed-optimizer`` divides Adam's state.
        expert_parallel_size: ranks over which routed experts are divided; their tensor-parallel
            size is the model's.
        sharded_parameters: whether ``optimizer_ranks`` divide weights and gradients too.
        selected_blocks_per_token: entries of the lists that attention saves, per token and layer of
            a whole model: KV heads (or query heads) times budget where tokens select, and that over
            the block size where blocks of queries do.
    """

    shape: ModelShape
    layers_per_stage: tuple[int, ...]
    virtual_stages: int
    tied_embeddings: bool
    sequence_parallel: bool
    optimizer_ranks: int
    selected_blocks_per_token: float = 0.0
    expert_parallel_size: int = 1
    sharded_parameters: bool = False
    recompute_all: bool = False
    recompute_attention: bool = False

    @property
    def stages(self) -> int:
        return len(self.layers_per_stage)

    def parameters(self, stage: int) -> float:
        """Parameters that one tensor-parallel rank of a stage holds, without routed experts.

        As ``megatron.training.theoretical_memory_usage`` counts them: projections without biases,
        two norms per layer, one norm in all at the end.
        """
        shape, share = self.shape, 1.0 / self.shape.tensor_parallel_size
        layer = (shape.layer_weights - shape.expert_router_weights) * share
        layer += shape.expert_router_weights + 2 * shape.hidden_size
        embedding = shape.vocabulary_weights * share
        first, last = stage == 0, stage == self.stages - 1
        embeddings = int(first) + int(last and not (first and self.tied_embeddings))
        return (
            self.layers_per_stage[stage] * layer
            + embeddings * embedding
            + int(last) * shape.hidden_size
        )

    def expert_parameters(self, stage: int) -> float:
        """Parameters of routed experts that one rank of a stage holds."""
        shape = self.shape
        if shape.experts is None:
            return 0.0
        of_rank = shape.routed_weights(shape.experts.experts) / shape.tensor_parallel_size
        return self.layers_per_stage[stage] * of_rank / self.expert_parallel_size

    def weights_bytes(self, stage: int) -> float:
        """Weights, gradients and Adam's state of a stage: 18 bytes per parameter.

        The distributed optimizer divides 12 of them by its ranks, those of an expert by the ranks
        that have it. Both as Megatron counts for training in bfloat16 with float32 gradients.
        """
        held = {
            self.parameters: self.optimizer_ranks,
            self.expert_parameters: max(1, self.optimizer_ranks // self.expert_parallel_size),
        }
        return sum(
            count(stage) * (18 / ranks if self.sharded_parameters else 6 + 12 / ranks)
            for count, ranks in held.items()
        )

    def layer_bytes_per_token(self) -> float:
        """Bytes that backward needs of one layer, per token of one rank's share of a sequence.

        Terms as in section 4 of arXiv:2205.05198, with attention that stores no scores but its
        log-sum-exp and lists, without dropout masks and without the latents of multi-latent
        attention. Routed experts are balanced, and read copies of their tokens.
        """
        shape, share = self.shape, 1.0 / self.shape.tensor_parallel_size
        hidden_share = share if self.sequence_parallel else 1.0
        heads, groups = shape.num_attention_heads, shape.num_query_groups
        if self.recompute_all:
            return _HALF * shape.hidden_size * hidden_share
        qkv_and_output = _HALF * (shape.head_dim + shape.value_dim) * (heads + groups)
        neurons, copies = float(shape.ffn_hidden_size), 0.0
        if (experts := shape.experts) is not None:
            of_token = experts.shared_ffn_hidden_size + experts.top_k * experts.ffn_hidden_size
            neurons += experts.layers_share * (of_token - neurons)
            copies = _HALF * experts.layers_share * experts.top_k * shape.hidden_size
        mlp = _HALF * neurons * (3 if shape.gated_linear_unit else 2)
        kept = 4 * _HALF * shape.hidden_size * hidden_share + (qkv_and_output + mlp) * share
        statistics = 0 if self.recompute_attention else _FLOAT * heads * share
        return kept + copies + statistics + self.lists_bytes_per_token

    @property
    def lists_bytes_per_token(self) -> float:
        """Those of them that lists take."""
        if self.recompute_all or self.recompute_attention:
            return 0.0
        return 4 * self.selected_blocks_per_token / self.shape.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class TokensHeld:
    """Tokens of the rank that holds most: in flight on every stage, of chunk forwards their share
    of the stage; in one operation; and in one micro-batch of several segments, 0 without."""

    in_flight_P: tuple[float, ...]
    largest: float
    longest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of the fullest rank of a stage; ``lists_bytes`` are a part of the activations."""

    weights_bytes: float
    activations_bytes: float
    lists_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.activations_bytes


def stage_memory(model: MemoryModel, stage: int, held: TokensHeld) -> StageMemory:
    """Memory of a stage while a step runs, on the rank that holds most."""
    layers, tokens_in_flight = model.layers_per_stage[stage], held.in_flight_P[stage]
    activations = tokens_in_flight * layers * model.layer_bytes_per_token()
    if held.longest:
        # Float32 sums of what later segments send; keys and values, which otherwise are computed
        # again.
        kept_tokens = _FLOAT * held.longest
        kept_tokens += _HALF * tokens_in_flight if model.recompute_all else 0.0
        shape = model.shape
        head_dims = (shape.head_dim + shape.value_dim) * shape.num_query_groups
        activations += kept_tokens * layers * head_dims / shape.tensor_parallel_size
    if model.recompute_all:
        # One layer at a time is computed again, and then held whole.
        activations += held.largest * replace(model, recompute_all=False).layer_bytes_per_token()
    if stage == model.stages - 1:
        # The logits in bfloat16 and their softmax in float32, of all in flight; with virtual
        # stages the last chunk runs backward at once.
        vocabulary_rows = model.shape.vocab_size / model.shape.tensor_parallel_size
        with_logits = tokens_in_flight if model.virtual_stages == 1 else held.largest
        activations += with_logits * (_HALF + _FLOAT) * vocabulary_rows
    return StageMemory(
        weights_bytes=model.weights_bytes(stage),
        activations_bytes=activations,
        lists_bytes=tokens_in_flight * layers * model.lists_bytes_per_token,
    )


def memory_lines(
    stages: Sequence[StageMemory], most: Sequence[StageMemory], source: str
) -> list[str]:
    """Lines with the memory of every stage: in planned steps, and at most."""
    lines = [
        f"memory per stage, counted, GiB of the fullest rank ({source}; not counted: "
        f"{NOT_COUNTED}):"
    ]
    texts = [_gibibytes(*both) for both in zip(stages, most, strict=True)]
    first = 0
    for text, alike in groupby(texts):
        last = first + len(list(alike)) - 1
        places = f"stage {first}" if first == last else f"stages {first}-{last}"
        lines.append(f"  {places}: {text}, with every micro-batch at the token cap")
        first = last + 1
    return lines


def _gibibytes(memory: StageMemory, most: StageMemory) -> str:
    def gibibytes(size: float) -> str:
        return f"{size / GIBIBYTE:.3g}"

    lists = f"(of which lists of blocks {gibibytes(memory.lists_bytes)}) "
    return (
        f"{gibibytes(memory.total_bytes)} = weights, gradients and optimizer "
        f"{gibibytes(memory.weights_bytes)} + activations {gibibytes(memory.activations_bytes)} "
        f"{lists if memory.lists_bytes else ''}in these steps; at most "
        f"{gibibytes(most.total_bytes)}"
    )
