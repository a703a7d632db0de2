# SPDX-License-Identifier: Apache-2.0
"""A step that was planned."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from sparsebalance_megatron import __version__
from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.graph import order_to_run
from sparsebalance_megatron.plan.pipeline.orders import PipelineOrder
from sparsebalance_megatron.plan.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan together with the samples it places.

    ``samples``: the training sample that the plan calls i, for every i. ``scales``: cost
    corrections that the plan's expectation contains. ``wait_ms``: how long the step waited for it.
    """

    plan: StepPlan
    samples: np.ndarray
    scales: StageScales
    plan_ms: float
    wait_ms: float = 0.0

    @property
    def micro_batches(self) -> int:
        """Micro-batches of every data-parallel rank."""
        return int(self.times_2RPVM.shape[-1])

    @property
    def in_segments(self) -> bool:
        """Whether stages run segments: some micro-batch of some rank has several."""
        return bool(self.cut_RM.any())

    @cached_property
    def cut_RM(self) -> np.ndarray:
        """Which micro-batches of every rank pass in segments."""
        ranks = map(self.plan.for_rank, range(self.plan.data_parallel_size))
        return np.array([[each.segments > 1 for each in rank.micro_batches] for rank in ranks])

    def order(self, rank: int, job: Job) -> PipelineOrder:
        """What the stages of a data-parallel rank run, in their order."""
        schedule = self.plan.schedule_of(rank) if self.in_segments else job.schedule
        return order_to_run(schedule, job.pipeline_stages, self.micro_batches, job.virtual_stages)

    @property
    def times_2RPVM(self) -> np.ndarray:
        """Predicted forward and backward ms of every micro-batch on every chunk."""
        return self.plan.expectation.times_2RPVM

    def to_bytes(self) -> bytes:
        """This step for another process, with a hash and the version of this package."""
        step = _ENCODER.encode(self)
        return _ENCODER.encode((__version__, hashlib.sha256(step).digest(), msgspec.Raw(step)))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "PlannedStep":
        """The step of :meth:`to_bytes`, or a :class:`PlanError`: of another version, or damaged."""
        try:
            version, digest, step = _ENVELOPE.decode(encoded)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise PlanError(f"these bytes are no plan ({error}); send those of to_bytes") from error
        if version != __version__:
            raise PlanError(
                f"the plan was written by version {version}, this is {__version__}; install the "
                "same version in all processes"
            )
        if hashlib.sha256(step).digest() != digest:
            raise PlanError("the plan's bytes are not those that were written; send it again")
        return _DECODER.decode(step)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray)
    return value.dtype.str, value.shape, value.tobytes()


def _array(kind: type, value: Any) -> np.ndarray:
    """Read-only, from what :func:`_plain` made of it."""
    assert kind is np.ndarray
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, bytes, msgspec.Raw])
_DECODER = msgspec.msgpack.Decoder(PlannedStep, dec_hook=_array)
