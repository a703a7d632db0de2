# SPDX-License-Identifier: Apache-2.0
"""The plan of one step: frozen data that every rank computes alike.

Shape legend: L layers of the whole model, S samples of a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class PlanError(ValueError):
    """No plan exists, or a plan breaks one of its invariants."""


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """How a training job is cut up. Sizes count ranks, micro-batches and layers.

    ``stage_layers[p][v]`` holds the global, zero-based indices of the layers in chunk ``v`` of
    pipeline stage ``p``; the embedding runs before the first chunk of stage 0, the output head and
    the loss after the last chunk of the last stage.
    """

    data_parallel_size: int
    micro_batches: int
    stage_layers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def pipeline_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def virtual_stages(self) -> int:
        return len(self.stage_layers[0])

    @property
    def layers(self) -> int:
        return sum(len(chunk) for stage in self.stage_layers for chunk in stage)

    @property
    def slots(self) -> int:
        return self.data_parallel_size * self.micro_batches


@dataclass(frozen=True, kw_only=True)
class PlanPolicy:
    """What the user chose; see :class:`sparsebalance_megatron.config.SparseBalanceConfig`."""

    batching: str
    tuning: str
    anchor: str
    coverage_threshold: float
    base_budget: int
    block_size: int
    max_tokens_per_slot: int
    plan_ms: float = 4.0
    coverage_target: str = "threshold"


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """One slot: the samples packed into one row, in order, and their budgets.

    ``samples``: positions in the global batch's order of arrival. ``lengths_tokens``: one per
    sample. ``budgets_LS``: KV blocks a query may read, int32, read-only, at least 1.
    """

    samples: tuple[int, ...]
    lengths_tokens: tuple[int, ...]
    budgets_LS: np.ndarray

    @property
    def tokens(self) -> int:
        return sum(self.lengths_tokens)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The micro-batches of one data-parallel rank, in the order they run."""

    micro_batches: tuple[MicroBatchPlan, ...]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the planner predicts of a plan. All times in ms, imbalances are max/mean.

    ``forward_ms[d][p][v][m]`` and ``backward_ms`` likewise: rank, stage, chunk, micro-batch.
    ``rank_makespan_ms[d]``: until the last backward of rank d. ``work_ratio``: predicted work over
    the predicted work of the same samples at base budgets, so that balance and less attention are
    never confounded. ``lower_bound_ms``: of every placement of these samples at every budget that
    the policy allows. Coverages are None until curves have been observed.
    """

    makespan_ms: float
    lower_bound_ms: float
    rank_makespan_ms: tuple[float, ...]
    forward_ms: np.ndarray
    backward_ms: np.ndarray
    imbalance_micro_batches: float
    imbalance_rank_sums: float
    imbalance_makespans: float
    coverage_mean: float | None
    coverage_min: float | None
    work_ratio: float
    samples_cut: int
    samples_raised: int
    samples_clamped: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of one step for all data-parallel ranks.

    Invariants, checked by :meth:`validate`: every sample of the global batch appears exactly once;
    every rank has the same number of slots and none is empty; no slot exceeds the token cap;
    budgets are positive and have one row per layer.
    """

    step: int
    ranks: tuple[RankPlan, ...]
    expectation: Expectation
    batching: str = field(default="arrival")
    """The batching that won: arrival, length, latency or makespan."""

    def digest(self) -> bytes:
        """32 bytes that are equal exactly when step, placement and budgets are equal."""
        digest = hashlib.sha256(f"{self.step}:{len(self.ranks)}".encode())
        for rank in self.ranks:
            for micro_batch in rank.micro_batches:
                digest.update(repr(micro_batch.budgets_LS.shape).encode())
                digest.update(np.asarray(micro_batch.samples, dtype=np.int64).tobytes())
                digest.update(np.asarray(micro_batch.lengths_tokens, dtype=np.int64).tobytes())
                digest.update(
                    np.ascontiguousarray(micro_batch.budgets_LS, dtype=np.int32).tobytes()
                )
        return digest.digest()

    def validate(self, lengths_tokens: Sequence[int], job: JobShape, policy: PlanPolicy) -> None:
        """Raise :class:`PlanError` naming the first broken invariant."""
        if len(self.ranks) != job.data_parallel_size:
            raise PlanError(
                f"step {self.step}: plan has {len(self.ranks)} ranks, job {job.data_parallel_size}"
            )
        layers = job.layers
        seen: Counter[int] = Counter()
        for rank_index, rank in enumerate(self.ranks):
            if len(rank.micro_batches) != job.micro_batches:
                raise PlanError(
                    f"step {self.step}, rank {rank_index}: {len(rank.micro_batches)} "
                    f"micro-batches, job has {job.micro_batches}"
                )
            for position, micro_batch in enumerate(rank.micro_batches):
                place = f"step {self.step}, rank {rank_index}, micro-batch {position}"
                _validate_micro_batch(micro_batch, lengths_tokens, layers, policy, place)
                seen.update(micro_batch.samples)
        if seen != Counter(range(len(lengths_tokens))):
            missing = sorted(set(range(len(lengths_tokens))) - set(seen))
            repeated = sorted(sample for sample, count in seen.items() if count > 1)
            raise PlanError(f"step {self.step}: samples missing {missing}, repeated {repeated}")


def _validate_micro_batch(
    micro_batch: MicroBatchPlan,
    lengths_tokens: Sequence[int],
    layers: int,
    policy: PlanPolicy,
    place: str,
) -> None:
    if not micro_batch.samples:
        raise PlanError(f"{place}: empty")
    if micro_batch.tokens > policy.max_tokens_per_slot:
        raise PlanError(
            f"{place}: {micro_batch.tokens} tokens exceed the cap of {policy.max_tokens_per_slot}"
        )
    if any(not 0 <= sample < len(lengths_tokens) for sample in micro_batch.samples):
        raise PlanError(f"{place}: sample index outside the global batch")
    expected_lengths = tuple(lengths_tokens[sample] for sample in micro_batch.samples)
    if micro_batch.lengths_tokens != expected_lengths:
        raise PlanError(f"{place}: lengths differ from the samples' lengths")
    if micro_batch.budgets_LS.shape != (layers, len(micro_batch.samples)):
        raise PlanError(
            f"{place}: budgets have shape {micro_batch.budgets_LS.shape}, "
            f"expected {(layers, len(micro_batch.samples))}"
        )
    if micro_batch.budgets_LS.min() < 1:
        raise PlanError(f"{place}: a budget is below 1 block")
