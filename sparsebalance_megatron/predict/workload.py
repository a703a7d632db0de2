# SPDX-License-Identifier: Apache-2.0
"""Global batches of a job, planned as training does; and lengths of documents, which become their
samples."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.config import Overlong, SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.fit import without_warnings
from sparsebalance_megatron.cost.memory import MemoryModel
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.json_file import parse_json, read_text
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.windows import Windows

STEPS = 20
"""Global batches that predictions plan by default."""
_COVERAGE_EXPONENT = 0.35

Placer = Callable[[Sequence[int], Job, int], Arrangement | Placement]
"""Places samples of so many tokens on the ranks of a job, of which each may hold so many."""

_LONGEST_TOKENS = 2**30
"""A thousand times what models are trained on."""
_AS_LENGTHS = "give a JSON list of lengths in tokens, or one per line"


class WorkloadError(ValueError):
    """A workload cannot be built from what the user named."""


def prior_coverage(layers: int, max_blocks: int) -> CoverageCurves:
    """Coverage (k / n)^0.35 of n blocks at budget k, alike in all layers; no measurement. A length
    bucket holds the curve of the geometric middle of its lengths."""
    curves = CoverageCurves(layers, max_blocks, 0.0)
    middle_U = 2.0 ** (np.arange(curves.buckets) + 0.5)
    curve_UK = np.minimum(np.asarray(curves.grid) / middle_U[:, None], 1.0) ** _COVERAGE_EXPONENT
    counts_LU = np.ones_like(curves.observed_LU, dtype=np.float64)
    curves.observe(np.broadcast_to(curve_UK, curves.mean_LUK.shape), counts_LU)
    return curves


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Global batches in order, on a job with its costs, its memory and the coverage to expect.

    ``batches``: lengths in tokens of every step's samples in order of arrival, alike in number.
    ``job``: with as many micro-batches a step as it may have. ``seed``: of the order of samples.
    ``placed_by``: who places samples; None is the plan.
    """

    batches: tuple[tuple[int, ...], ...]
    job: Job
    plan_settings: PlanSettings
    cost: CostModel
    coverage: CoverageCurves
    memory: MemoryModel
    seed: int = 1234
    placed_by: Placer | None = None

    @classmethod
    def of(
        cls,
        job: HostJob,
        config: SparseBalanceConfig,
        batches: Sequence[Sequence[int]],
        *,
        cost: CostModel | None = None,
        micro_batch_size: int = 1,
        tied_embeddings: bool = False,
        sequence_parallel: bool = True,
        distributed_optimizer: bool = True,
        sharded_parameters: bool = False,
        seed: int = 1234,
    ) -> "Workload":
        """Global batches of a job, with the prior of coverage; see :class:`.MemoryModel`.

        Args:
            cost: of the job; None takes those of the configuration.
            micro_batch_size: samples of a micro-batch on average.
            seed: of the order of samples.
        """
        if cost is None:
            with without_warnings():
                cost = job.cost_model(config, {})
        config = with_dense_length(config, cost, job.padded(job.max_sample_tokens))
        layout, divides = job.layout, distributed_optimizer or sharded_parameters
        return cls(
            batches=tuple(map(tuple, batches)),
            job=layout,
            plan_settings=job.plan_settings(config, micro_batch_size * job.max_sample_tokens),
            cost=cost,
            coverage=prior_coverage(layout.layers, job.coverage(config).grid[-1]),
            memory=MemoryModel(
                shape=job.shape,
                layers_per_stage=tuple(sum(map(len, stage)) for stage in layout.stage_layers),
                virtual_stages=layout.virtual_stages,
                tied_embeddings=tied_embeddings,
                sequence_parallel=sequence_parallel,
                optimizer_ranks=layout.data_parallel_size if divides else 1,
                expert_parallel_size=job.expert_parallel_size,
                sharded_parameters=sharded_parameters,
                recompute_all=job.recompute_all,
                recompute_attention=job.recompute_attention,
            ),
            seed=seed,
        )

    @property
    def gpus(self) -> int:
        ranks = self.job.data_parallel_size * self.job.pipeline_stages
        return ranks * self.memory.shape.tensor_parallel_size

    def of_steps(self, steps: int) -> "Workload":
        """The first steps, at most so many."""
        return replace(self, batches=self.batches[:steps])

    @property
    def dealt_batches(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of the steps' samples once windows have exchanged them."""
        return Windows.of(self.plan_settings.config, self.seed).dealt(self.batches)

    @property
    def is_dense(self) -> bool:
        """Whether all layers are."""
        return bool(self.plan_settings.dense_L(self.job.layers).all())

    def planned_steps(self) -> Iterator[PlannedStep]:
        """One step per batch, as training plans steps that take what was predicted: nothing is
        learnt.

        Raises:
            PlanError: a batch has no placement under the policy's cap.
        """
        planner = StepPlanner(
            job=self.job,
            plan_settings=self.plan_settings,
            cost=self.cost,
            coverage=self.coverage,
            clock=time.process_time,
        )
        known = planner.knowledge()
        for step, batch in enumerate(self.dealt_batches):
            placement = None
            if self.placed_by is not None:
                rank_tokens = self.plan_settings.max_tokens_per_micro_batch
                placement = self.placed_by(batch, self.job, rank_tokens)
            yield planner.plan(step, batch, self.job, known, placement=placement)


def read_lengths(path: Path) -> np.ndarray:
    """Lengths from a JSON list, or from text with one length per line.

    Raises:
        WorkloadError: the file cannot be read, or holds something else.
    """
    try:
        text = read_text(path)
        as_json = text.lstrip().startswith("[")
        lengths = parse_json(text) if as_json else [_number(word) for word in text.split()]
    except ValueError as error:
        raise WorkloadError(f"{path}: {str(error)[:200]}; {_AS_LENGTHS}") from error
    if not lengths:
        raise WorkloadError(f"{path}: no lengths; {_AS_LENGTHS}")
    for number, value in enumerate(lengths, start=1):
        if type(value) is not int or not 1 <= value <= _LONGEST_TOKENS:
            raise WorkloadError(
                f"{path}: length {number} is {str(value)[:40]}: must be a whole number from 1 to "
                f"{_LONGEST_TOKENS}; {_AS_LENGTHS}"
            )
    return np.array(lengths, dtype=np.int64)


def _number(word: str) -> int | str:
    return int(word) if word.isdecimal() and len(word) <= len(str(_LONGEST_TOKENS)) else word


def batches_of(
    lengths: np.ndarray, batch_size: int, steps: int, place: object
) -> tuple[tuple[int, ...], ...]:
    """Consecutive global batches, at most ``steps``; an incomplete last one is left out.

    Raises:
        WorkloadError: there is not one at this place, where the lengths come from.
    """
    batches = min(steps, len(lengths) // batch_size)
    if not batches:
        raise WorkloadError(
            f"{place}: {len(lengths)} samples, and a step takes --global-batch-size {batch_size}; "
            "give more, or lower it"
        )
    whole = lengths[: batches * batch_size].reshape(batches, batch_size)
    return tuple(map(tuple, whole.tolist()))


def samples_of(lengths: np.ndarray, seq_length: int, overlong: Overlong) -> np.ndarray:
    """Lengths of the samples that documents become: none above ``seq_length``."""
    if overlong == "drop":
        return lengths[lengths <= seq_length]
    if overlong == "truncate":
        return np.minimum(lengths, seq_length)
    pieces = -(-lengths // seq_length)
    cut = np.full(int(pieces.sum()), seq_length, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_length
    return cut
