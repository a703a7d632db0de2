# SPDX-License-Identifier: Apache-2.0
"""The plan of one step: frozen data that every rank computes alike."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import batched
from operator import attrgetter

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.groups import Groups, is_power_of_two
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule
from sparsebalance_megatron.plan.settings import PlanSettings


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """One packed sequence: its samples in order, their budgets, and where it runs.

    ``samples``: positions in the global batch's order of arrival. ``lengths_tokens``: one per
    sample. ``budgets_LS``: KV blocks a query may read, int32, read-only, at least 1. ``position``:
    of the rank's micro-batches. ``cp_size``: so many neighbouring data-parallel ranks share
    it, beginning at ``rank``, a multiple of ``cp_size``. ``segment_starts_blocks``: where each of
    its segments begins, counted in blocks of the packed sequence; the first is 0.
    ``dense_documents_L``: so many first documents each layer attends to densely, without a router;
    int32, read-only, empty where no layer does.
    """

    samples: tuple[int, ...]
    lengths_tokens: tuple[int, ...]
    budgets_LS: np.ndarray
    rank: int
    position: int
    cp_size: int = 1
    segment_starts_blocks: tuple[int, ...] = (0,)
    dense_documents_L: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def tokens(self) -> int:
        return sum(self.lengths_tokens)

    @property
    def segments(self) -> int:
        """Pieces, along the sequence, in which it passes the pipeline."""
        return len(self.segment_starts_blocks)

    def segment_tokens(self, block_size: int) -> np.ndarray:
        """Tokens of every segment; blocks begin anew with every sample."""
        blocks = np.cumsum([0, *(-(-tokens // block_size) for tokens in self.lengths_tokens)])
        tokens = np.cumsum([0, *self.lengths_tokens])
        sample = np.searchsorted(blocks, self.segment_starts_blocks, side="right") - 1
        starts = (
            tokens[sample] + (np.array(self.segment_starts_blocks) - blocks[sample]) * block_size
        )
        return np.diff(starts, append=tokens[-1])


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The micro-batches that one data-parallel rank takes part in, in the order they run."""

    micro_batches: tuple[MicroBatchPlan, ...]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Predictions of a plan. All times in ms.

    ``times_2RPVM``: forward and backward of every micro-batch on every chunk, all segments
    together. ``segment_ms``: by rank, [2, P, U] of its micro-batches' segments, of lockstep groups
    until all its ranks end; empty where all run in one piece. ``rank_makespan_ms``: until the last
    backward of each rank, or of its lockstep group; times of micro-batches are the ranks' own.
    ``work_ratio``: predicted work over the predicted work of the same samples at base budgets, so
    that balance and less attention are never confounded. ``lower_bound_ms``: of every placement of
    these samples at every budget that the policy allows. Coverages are None until curves have been
    observed.
    """

    makespan_ms: float
    lower_bound_ms: float
    rank_makespan_ms: tuple[float, ...]
    times_2RPVM: np.ndarray
    coverage_mean: float | None
    coverage_min: float | None
    work_ratio: float
    samples_cut: int
    samples_raised: int
    segment_ms: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of one step for all data-parallel ranks.

    ``micro_batches`` holds every micro-batch once. ``batching`` is the one that won.

    Invariants, checked by :meth:`validate`: every sample of the global batch appears exactly once;
    every (rank, position) of the job is covered by exactly one micro-batch, and none is empty; no
    rank's share of a micro-batch exceeds the token cap; budgets are positive, for every layer; the
    micro-batches of a lockstep group at one position have equally many segments.
    """

    step: int
    data_parallel_size: int
    micro_batches: tuple[MicroBatchPlan, ...]
    expectation: Expectation
    batching: Batching = "arrival"

    def for_rank(self, rank: int) -> RankPlan:
        """Micro-batches of a data-parallel rank, position by position."""
        return self._rank_plans[rank]

    def schedule_of(self, rank: int) -> SegmentedSchedule:
        """The schedule of a data-parallel rank's stages; in one piece where nothing is cut."""
        return self._schedules[rank]

    def rank_tokens_RM(self) -> np.ndarray:
        """Tokens of every rank's share of its micro-batches, position by position, float64."""
        return np.array(
            [
                [micro_batch.tokens / micro_batch.cp_size for micro_batch in rank.micro_batches]
                for rank in self._rank_plans
            ]
        )

    @cached_property
    def _rank_plans(self) -> tuple[RankPlan, ...]:
        of_rank: list[list[MicroBatchPlan]] = [[] for _ in range(self.data_parallel_size)]
        for micro_batch in sorted(self.micro_batches, key=attrgetter("position")):
            for rank in range(micro_batch.rank, micro_batch.rank + micro_batch.cp_size):
                of_rank[rank].append(micro_batch)
        return tuple(RankPlan(micro_batches=tuple(micro_batches)) for micro_batches in of_rank)

    @cached_property
    def _schedules(self) -> tuple[SegmentedSchedule, ...]:
        cp_sizes_RM, segments_RM = (
            np.array([[get(each) for each in rank.micro_batches] for rank in self._rank_plans])
            for get in (attrgetter("cp_size"), attrgetter("segments"))
        )
        most_RM = Groups(cp_sizes_RM).most_RM(segments_RM)
        return tuple(
            SegmentedSchedule(tuple(own_M), tuple(most_M))
            for own_M, most_M in zip(segments_RM.tolist(), most_RM.tolist(), strict=True)
        )

    @cached_property
    def budgets_LS(self) -> np.ndarray:
        """Budgets of all samples in order of arrival, int32: what a later plan may pin."""
        samples = [sample for micro_batch in self.micro_batches for sample in micro_batch.samples]
        budgets_LS = np.empty(
            (self.micro_batches[0].budgets_LS.shape[0], len(samples)), dtype=np.int32
        )
        budgets_LS[:, samples] = np.concatenate(
            [micro_batch.budgets_LS for micro_batch in self.micro_batches], axis=1
        )
        return budgets_LS

    def digest(self) -> bytes:
        """32 bytes that are equal exactly when step, placement, budgets and dense documents are
        equal."""
        digest = hashlib.sha256(f"{self.step}:{self.data_parallel_size}".encode())
        for micro_batch in sorted(self.micro_batches, key=attrgetter("rank", "position")):
            if micro_batch.cp_size > 1:
                digest.update(
                    f"{micro_batch.rank}:{micro_batch.position}:{micro_batch.cp_size}".encode()
                )
            if micro_batch.segments > 1:
                digest.update(f"segments from {micro_batch.segment_starts_blocks}".encode())
            digest.update(repr(micro_batch.budgets_LS.shape).encode())
            digest.update(np.asarray(micro_batch.samples, dtype=np.int64).tobytes())
            digest.update(np.asarray(micro_batch.lengths_tokens, dtype=np.int64).tobytes())
            digest.update(np.ascontiguousarray(micro_batch.budgets_LS, dtype=np.int32).tobytes())
            digest.update(micro_batch.dense_documents_L.astype(np.int32).tobytes())
        return digest.digest()

    def validate(
        self, lengths_tokens: Sequence[int], job: Job, plan_settings: PlanSettings
    ) -> None:
        """Raise :class:`PlanError` naming the first broken invariant."""
        if self.data_parallel_size != job.data_parallel_size:
            raise PlanError(
                f"step {self.step}: plan has {self.data_parallel_size} ranks, job "
                f"{job.data_parallel_size}"
            )
        covered_RM = np.zeros((job.data_parallel_size, job.micro_batches), dtype=np.int64)
        samples: list[int] = []
        for micro_batch in self.micro_batches:
            rank, position = micro_batch.rank, micro_batch.position
            if defect := _defect(micro_batch, lengths_tokens, job, plan_settings):
                raise PlanError(f"step {self.step}, rank {rank}, micro-batch {position}: {defect}")
            covered_RM[rank : rank + micro_batch.cp_size, position] += 1
            samples += micro_batch.samples
        if (covered_RM != 1).any():
            rank, position = np.argwhere(covered_RM != 1)[0]
            raise PlanError(
                f"step {self.step}, rank {rank}, micro-batch {position}: in "
                f"{covered_RM[rank, position]} micro-batches, must be in exactly 1"
            )
        for group in batched(self._schedules, job.lockstep_ranks):
            if any(of_rank != group[0] for of_rank in group):
                raise PlanError(
                    f"step {self.step}: ranks of a lockstep group have "
                    f"{[of_rank.segments_M for of_rank in group]} segments by position, and ranks "
                    f"that they meet at most {[of_rank.most_segments_M for of_rank in group]}, "
                    "must have equally many"
                )
        if sorted(samples) != list(range(len(lengths_tokens))):
            seen = Counter(samples)
            missing = sorted(set(range(len(lengths_tokens))) - set(seen))
            repeated = sorted(sample for sample, count in seen.items() if count > 1)
            raise PlanError(f"step {self.step}: samples missing {missing}, repeated {repeated}")
        if self.budgets_LS.min() < 1:
            sample = int(self.budgets_LS.min(axis=0).argmin())
            raise PlanError(f"step {self.step}, sample {sample}: a budget is below 1 block")


def _defect(
    micro_batch: MicroBatchPlan,
    lengths_tokens: Sequence[int],
    job: Job,
    plan_settings: PlanSettings,
) -> str | None:
    """The first thing that is wrong with a micro-batch by itself."""
    rank, cp_size, samples = micro_batch.rank, micro_batch.cp_size, micro_batch.samples
    cap_tokens = plan_settings.max_tokens_per_micro_batch * cp_size
    shape = job.layers, len(samples)
    if not is_power_of_two(cp_size) or rank % cp_size:
        return f"cp_size {cp_size} is no power of two, or rank {rank} no multiple of it"
    if rank < 0 or rank + cp_size > job.data_parallel_size:
        return f"{cp_size} ranks from there are not all among the job's {job.data_parallel_size}"
    if not 0 <= micro_batch.position < job.micro_batches:
        return f"job has {job.micro_batches} micro-batches"
    if not samples:
        return "empty"
    if (starts := micro_batch.segment_starts_blocks) != (0,):
        block_size = plan_settings.config.block_size
        blocks = sum(-(-length // block_size) for length in micro_batch.lengths_tokens)
        # A whole micro-batch with too few blocks for its ranks is padded.
        if starts[0] != 0 or min(np.diff([*starts, blocks])) < cp_size:
            return f"segments begin at blocks {starts} of {blocks} on {cp_size} ranks"
        if len(starts) > plan_settings.config.max_segments:
            return f"{len(starts)} segments, at most {plan_settings.config.max_segments}"
    if micro_batch.tokens > cap_tokens:
        return f"{micro_batch.tokens} tokens exceed the cap of {cap_tokens}"
    if min(samples) < 0 or max(samples) >= len(lengths_tokens):
        return "sample index outside the global batch"
    if micro_batch.lengths_tokens != tuple(lengths_tokens[sample] for sample in samples):
        return "lengths differ from the samples' lengths"
    if micro_batch.budgets_LS.shape != shape:
        return f"budgets have shape {micro_batch.budgets_LS.shape}, expected {shape}"
    dense_L = micro_batch.dense_documents_L
    if dense_L.shape not in ((0,), shape[:1]) or ((dense_L < 0) | (dense_L > shape[1])).any():
        return f"dense documents {dense_L.tolist()}: expected {shape[0]} numbers up to {shape[1]}"
    return None
