# SPDX-License-Identifier: Apache-2.0
"""Layout of a training job: ranks, pipeline stages and micro-batches."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.plan.groups import is_power_of_two
from sparsebalance_megatron.plan.pipeline.graph import PipelineGraph, graph_of
from sparsebalance_megatron.plan.pipeline.orders import MegatronSchedule, Schedule

_DEFAULT_MAX_CP_SIZE = 8
"""Ranks. A packed sequence over more of them waits for its exchange more than it gains."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The layout that a step is planned for. Sizes count ranks, micro-batches and layers.

    Attributes:
        stage_layers: [P][V][layers], global and zero-based: the layers in each chunk of each
            pipeline stage. The embedding runs before the first chunk of stage 0, the output head
            and the loss after the last chunk of the last stage.
        data_parallel_size: ranks that hold different tokens, Megatron's data-parallel times its
            context-parallel ranks; neighbours among them may share a micro-batch.
        micro_batches: positions of a rank.
        context_parallel_size: Megatron's ``--context-parallel-size``. It fixes ``micro_batches`` as
            global batch / (micro-batch size x data-parallel size), where the latter counts no
            context-parallel ranks.
        micro_batch_group_size: micro-batches that a chunk runs before the stage's next chunk takes
            over; None is as many as there are stages.
        lockstep_ranks: neighbours among the data-parallel ranks that begin every layer together, a
            lockstep group: those of an expert-parallel group. It counts context-parallel ranks as
            ``data_parallel_size`` does, and divides it. 1: no rank waits for another in a layer.
        order: the schedule in which stages of one chunk run micro-batches in one piece; None is
            Megatron's. A stage runs forwards by rising position. It sends what an operation gave,
            and receives what the next one takes, before that begins.
    """

    stage_layers: tuple[tuple[tuple[int, ...], ...], ...]
    data_parallel_size: int
    micro_batches: int = 1
    context_parallel_size: int = 1
    micro_batch_group_size: int | None = None
    lockstep_ranks: int = 1
    order: Schedule | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.order is not None and self.virtual_stages > 1:
            raise ConfigError("job: order: stages must have one chunk; leave the order to Megatron")
        if self.lockstep_ranks < 1 or self.data_parallel_size % self.lockstep_ranks:
            raise ConfigError(
                f"job: lockstep_ranks {self.lockstep_ranks}: must divide the "
                f"{self.data_parallel_size} data-parallel x context-parallel ranks"
            )

    @classmethod
    def even(cls, *, layers: int, ranks: int, stages: int, micro_batches: int = 1) -> "Job":
        """Contiguous layers, one chunk a stage; the first stages take the remainder.

        Raises:
            ConfigError: there are fewer layers than stages.
        """
        if layers < stages:
            raise ConfigError(f"{stages} pipeline stages: the model has {layers} layers only")
        size, rest = divmod(layers, stages)
        ends = [size * (stage + 1) + min(stage + 1, rest) for stage in range(stages)]
        return cls(
            stage_layers=tuple(
                (tuple(range(first, end)),) for first, end in zip([0, *ends], ends, strict=False)
            ),
            data_parallel_size=ranks,
            micro_batches=micro_batches,
        )

    @property
    def pipeline_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def virtual_stages(self) -> int:
        return len(self.stage_layers[0])

    @cached_property
    def layers(self) -> int:
        return sum(len(chunk) for stage in self.stage_layers for chunk in stage)

    @property
    def places(self) -> int:
        """Places of a rank and a position."""
        return self.data_parallel_size * self.micro_batches

    @cached_property
    def place_EMW(self) -> np.ndarray:
        """[E, M, W] places ``rank * M + position`` of each lockstep group's ranks, by position."""
        place_EWM = np.arange(self.places).reshape(-1, self.lockstep_ranks, self.micro_batches)
        return place_EWM.swapaxes(1, 2)

    @property
    def micro_batches_multiple_of(self) -> int:
        """Divisor of the number of micro-batches: groups of the interleaved schedule are whole."""
        size = self.micro_batch_group_size or self.pipeline_stages
        return size if self.virtual_stages > 1 else 1

    @property
    def schedule(self) -> Schedule:
        """The schedule in which this job's pipelines run micro-batches in one piece."""
        return self.order or MegatronSchedule(self.micro_batch_group_size)

    @cached_property
    def graph(self) -> PipelineGraph:
        """The operations of a rank's pipeline.

        Raises:
            PlanError: the schedule does not exist for this job.
        """
        return graph_of(
            self.schedule, self.pipeline_stages, self.virtual_stages, self.micro_batches
        )

    @cached_property
    def chunk_of_layer_L(self) -> np.ndarray:
        """The chunk of the pipeline that each layer belongs to."""
        chunks = [chunk for stage in self.stage_layers for chunk in stage]
        chunk_of_layer_L = np.empty(self.layers, dtype=np.int64)
        for number, layers in enumerate(chunks):
            chunk_of_layer_L[list(layers)] = number
        return chunk_of_layer_L

    @property
    def groups(self) -> "Job":
        """The job whose ranks are the context-parallel groups of this one."""
        cp_size = self.context_parallel_size
        return replace(
            self,
            data_parallel_size=self.data_parallel_size // cp_size,
            context_parallel_size=1,
            lockstep_ranks=math.lcm(self.lockstep_ranks, cp_size) // cp_size,
        )


def lockstep_notice(lockstep_ranks: int) -> str | None:
    """Sentences on what is measured where ranks run in lockstep; None where none do."""
    if lockstep_ranks == 1:
        return None
    return (
        f"Groups of {lockstep_ranks} data-parallel ranks wait for one another in every layer. "
        "Computing, imbalance and device speeds are of own times: the time of a micro-batch less "
        "what its rank spent inside token exchanges of expert layers beyond the least of the "
        "group, which counts as waiting. Where own times are unknown, these numbers are missing."
    )


def whole_parts(samples: int, name: str, sizes: dict[str, int]) -> int:
    """Divide ``samples`` by the product of ``sizes``.

    Args:
        name: of the number of samples, as a user knows it.
        sizes: name -> size.

    Raises:
        ConfigError: it does not divide it, or is more.
    """
    part = math.prod(sizes.values())
    if part < 1 or samples < part or samples % part:
        factors = " x ".join(f"{of} {size}" for of, size in sizes.items())
        raise ConfigError(f"{name} {samples} must be a multiple of {factors} = {part}")
    return samples // part


def check_cp_sizes(ranks: int, cp_size: int, max_cp_size: int) -> None:
    """Refuse context-parallel sizes that groups of neighbouring ranks cannot have.

    Args:
        ranks: data-parallel times context-parallel.

    Raises:
        ConfigError: a size is no power of two that divides the ranks, or the largest is below the
            one that micro-batches have on average.
    """
    limit = flag_name("max_context_parallel")
    for name, size in (("--context-parallel-size", cp_size), (limit, max_cp_size)):
        if not is_power_of_two(size) or ranks % size:
            raise ConfigError(
                f"{name} {size}: must be a power of two that divides the {ranks} data-parallel x "
                "context-parallel ranks"
            )
    if max_cp_size < cp_size:
        raise ConfigError(
            f"{limit} {max_cp_size}: must be at least --context-parallel-size {cp_size}"
        )


def max_cp_size(
    job: Job, config: SparseBalanceConfig, neighbours_per_node: int, served: Exchange | None = None
) -> int:
    """Most ranks that may share a micro-batch.

    Where the user names no limit, none share whose cp_size is 1 or fixed. Else it doubles while the
    ranks divide: up to 8 and as many as a node holds, or, with ``served``, while heads travel by it
    between so many.

    Raises:
        ConfigError: as :func:`check_cp_sizes`.
    """
    ranks, size = job.data_parallel_size, job.context_parallel_size
    given = config.max_context_parallel
    largest = size if given is None else given

    def may_share(members: int) -> bool:
        if served is not None:
            return served.heads_obstacle(members) is None
        return members <= min(_DEFAULT_MAX_CP_SIZE, neighbours_per_node)

    if given is None and config.context_parallel == "dynamic" and size > 1:
        while ranks % (2 * largest) == 0 and may_share(2 * largest):
            largest *= 2
    check_cp_sizes(ranks, size, largest)
    return largest
