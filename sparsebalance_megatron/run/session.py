# SPDX-License-Identifier: Apache-2.0
"""Starts and resumes a training run that reads its own data, on one rank.

:class:`.inputs.Inputs` is what could be checked before process groups exist; :class:`.run.Run` and
the iterators need them. :mod:`.training_hooks` puts a session into ``megatron.training``,
:mod:`.trainer` into a trainer that calls Megatron's schedules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import RankPlace
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.log.log_directory import LogDirectory, LogDirectoryError
from sparsebalance_megatron.megatron.kernel_check import KernelCheckError, check_kernels
from sparsebalance_megatron.megatron.sequence_groups import rank_place
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.plan.plan_error import PlanError
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.agreement import check_ranks_agree, gather_or_raise
from sparsebalance_megatron.run.inputs import Inputs, fingerprint
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator, SequencePacking
from sparsebalance_megatron.run.run import Loop, Run
from sparsebalance_megatron.run.sinks import open_sinks

_SAMPLES = "training samples"
_WHAT_SAMPLES_FOLLOW = (
    "the files, --split, --seq-length, --seed or --sparse-balance-overlong changed"
)
_SHOWN_CHARACTERS = 80
"""Longest text of an error."""

SchedulerMaker = Callable[[Inputs], Scheduler]


class Session:
    """A run on one rank that :meth:`start` starts, and state that it may go on from.

    Args:
        after_step: called when a step has been learnt from, where :meth:`state_dict` may be kept.
        make_scheduler: gives what plans the run; the place to put another scheduler.
    """

    def __init__(
        self,
        inputs: Inputs,
        device: torch.device,
        loop: Loop,
        after_step: Callable[[], None] = lambda: None,
        make_scheduler: SchedulerMaker = Inputs.scheduler,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self._loop = loop
        self._after_step = after_step
        self._make_scheduler = make_scheduler
        self._run: Run | None = None
        self._scheduler: Scheduler
        self._packing: SequencePacking
        self._place: RankPlace
        self._record: dict[str, str] = {}
        self._loaded_state: dict[str, Any] | None = None
        self._log_directory: LogDirectory | None = None

    @property
    def run(self) -> Run:
        """The run; raises :class:`StateError` if it has not been started."""
        if self._run is None:
            raise StateError("the run has not started: ask for the training iterator first")
        return self._run

    def start(self, *, consumed_samples: int, iteration: int | None = None) -> None:
        """Start the run, unless it has started; collective over all ranks, on which errors are
        alike.

        Args:
            consumed_samples: trained on before; a step must begin there.
            iteration: steps trained before, as the trainer counts them; None for a trainer that
                does not say. With another global batch size than now, it is not what the samples
                make.
        """
        settings = self.inputs.settings
        steps = settings.batch_sizes.step_at(consumed_samples)
        if steps is None:
            raise StateError(
                f"the checkpoint has consumed {consumed_samples} samples, "
                + (
                    "after which no step of --step-batch-size-schedule begins; resume with the "
                    "schedule that it was trained with"
                    if settings.batch_size_schedule
                    else f"no multiple of --global-batch-size {settings.global_batch_size}; resume "
                    "with another global batch size"
                )
            )
        settings.check_batch_sizes(steps)
        if self._run is None:
            if iteration is None:
                iteration = (self._loaded_state or {}).get("iteration", steps)
            self._run = self._started(resumed=consumed_samples > 0, extra_steps=iteration - steps)

    def _started(self, *, resumed: bool, extra_steps: int) -> Run:
        inputs = self.inputs
        self._record = fingerprint(inputs)
        check_ranks_agree(self._record)
        settings = inputs.settings
        what = inputs.config, settings.host_job.shape, settings.dtype, self.device
        (checked, *_) = gather_or_raise(lambda: check_kernels(*what), KernelCheckError)
        print_rank_0(f"sparse balance: {checked}")
        if inputs.config.log_dir is not None:
            self._log_directory = LogDirectory(inputs.config.log_dir)
            prepare_log_directory(self._log_directory, keep_in_place=resumed)
        scheduler = self._make_scheduler(inputs)
        if self._loaded_state is not None:
            _take_over(self._loaded_state, scheduler, self._record)
        elif resumed:
            print_rank_0(
                "sparse balance: the checkpoint has no plugin state; coverage curves and cost "
                "corrections start afresh"
            )
        for line in inputs.train.describe():
            print_rank_0(f"sparse balance: {line}")
        first = torch.distributed.get_rank() == 0
        (untrained, *_) = gather_or_raise(lambda: inputs.untrained() if first else (), DataError)
        (uneven, *_) = gather_or_raise(lambda: inputs.uneven_stages() if first else (), PlanError)
        for line in (inputs.dense_length(), *untrained, *uneven):
            print_rank_0(f"sparse balance: {line}")
        if notice := lockstep_notice(inputs.job.lockstep_ranks):
            print_rank_0(f"sparse balance: {notice}")
        self._place = place = rank_place()
        self._packing = packing = SequencePacking.of_run(
            inputs.config,
            largest_cp_size=inputs.plan_settings.max_context_parallel,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            neighbours_per_node=settings.host_job.neighbours_per_node,
            timeout_minutes=settings.distributed_timeout_minutes,
        )
        self._scheduler = scheduler
        return Run(
            inputs.job,
            scheduler,
            self._loop,
            self.device,
            extra_steps=extra_steps,
            sinks=open_sinks(inputs, place, scheduler.coverage, self.device, resumed=resumed),
            agreement=packing.agreement,
            after_step=self._after_step,
            token_counts=self._token_counts,
        )

    def _token_counts(self, plan: StepPlan) -> dict[str, int]:
        """Tokens that a step's plan pads, over all ranks, and those that the data set lost."""
        counts = self.inputs.train.counts
        return {
            "padded-tokens": sum(map(self._packing.padded_tokens, plan.micro_batches)),
            "truncated-tokens": counts.truncated_tokens,
            "dropped-tokens": counts.dropped_tokens,
        }

    def train_iterator(
        self, *, consumed_samples: int, vp_stage: int | None = None
    ) -> MicroBatchIterator:
        """This rank's training micro-batches for one model chunk, from the beginning of a step."""
        sizes = self.inputs.settings.batch_sizes
        return self._iterator(
            self._scheduler, self.inputs.train, consumed_samples, vp_stage, sizes, training=True
        )

    def evaluation_iterator(
        self, index: SampleIndex, *, consumed_samples: int, vp_stage: int | None = None
    ) -> MicroBatchIterator:
        """Micro-batches of validation or test samples, at base budgets; the last step that has
        begun begins anew."""
        batch_size = self.inputs.settings.evaluation_batch_size
        scheduler = self.inputs.evaluation_scheduler(index, self._scheduler.coverage)
        begun = consumed_samples // batch_size * batch_size
        sizes = BatchSizes.constant(batch_size)
        return self._iterator(scheduler, index, begun, vp_stage, sizes, training=False)

    def _iterator(
        self,
        scheduler: Scheduler,
        index: SampleIndex,
        consumed_samples: int,
        vp_stage: int | None,
        sizes: BatchSizes,
        *,
        training: bool,
    ) -> MicroBatchIterator:
        job, chunk = self.inputs.job, vp_stage or 0
        last = job.pipeline_stages - 1, job.virtual_stages - 1
        reads = (self._place.pipeline_rank, chunk) in ((0, 0), last)
        step = sizes.step_at(consumed_samples)
        assert step is not None, "start has checked it"
        return MicroBatchIterator(
            scheduler,
            index if reads else None,
            self._packing,
            device=self.device,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            training=training,
            step=step,
            batch_sizes=sizes,
            worker=ThreadPoolExecutor(1, "sparse-balance-read"),
        )

    def state_dict(self) -> dict[str, Any]:
        """State that resuming needs besides the number of consumed samples; plain Python types."""
        if self._run is not None:
            state = self._scheduler.state_dict()
            steps = self.inputs.settings.batch_sizes.step_at(state["consumed_samples"])
            assert steps is not None, "the scheduler counts by the same sizes"
            return state | {"run": self._record, "iteration": steps + self._run.extra_steps}
        if self._loaded_state is None:
            raise StateError("nothing to save: the training iterator has not been asked for yet")
        return self._loaded_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier run, on every rank the same, before iterators exist."""
        self._loaded_state = state
        if self._run is None:
            self.inputs = self.inputs.with_kept_dense_length(state.get("dense_up_to_tokens"))
        if self._run is not None:
            _take_over(state, self._scheduler, self._record)


def print_rank_0(message: str) -> None:
    """Print on the first rank of the default group only."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def prepare_log_directory(directory: LogDirectory, *, keep_in_place: bool) -> None:
    """Claim the directory and move an earlier run's logs out of the way; collective, errors alike.

    ``keep_in_place``: the run goes on with the logs that are there.
    """
    claims = torch.distributed.get_rank() == 0

    def make() -> int:
        directory.make(claim=claims)
        return 0 if keep_in_place else directory.number_for_earlier_logs()

    # Ranks of other hosts may see another disk.
    number = max(gather_or_raise(make, LogDirectoryError))
    if number:
        (kept, *_) = gather_or_raise(lambda: directory.set_aside(number), LogDirectoryError)
        print_rank_0(f"sparse balance: logs of an earlier run are kept in {kept}")


def compare_runs(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Differences from the run that wrote the checkpoint, one sentence each; all of them allowed.

    Raises:
        StateError: if the training samples differ: the number of samples consumed, by which a run
            finds its place, means nothing in other data.
    """
    changes = tuple(
        f"{name} is {now.get(name, 'absent')}, in the checkpoint {saved.get(name, 'absent')}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    )
    if saved[_SAMPLES] != now[_SAMPLES]:
        sources = "; ".join(change for change in changes if change.startswith("source "))
        raise StateError(
            "--data-path: the training samples are not those of the checkpoint ("
            f"{sources or _WHAT_SAMPLES_FOLLOW}); resume with the same ones, or begin anew on "
            "these from the checkpoint's weights with --finetune"
        )
    return changes


def _take_over(state: dict[str, Any], scheduler: Scheduler, record: Mapping[str, str]) -> None:
    """Go on from loaded state, and say what differs from the run that wrote it."""
    try:
        differences = compare_runs(state.get("run", record), record)
        notes = (*differences, *scheduler.load_state_dict(state))
    except StateError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0][:_SHOWN_CHARACTERS]
        raise StateError(
            f"the plugin's state in the checkpoint is damaged ({type(error).__name__}: {reason}); "
            "resume from another checkpoint, or with --finetune"
        ) from error
    for note in notes:
        print_rank_0(f"sparse balance: resumed: {note}")
