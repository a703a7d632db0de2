# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank, before and after process groups exist, whoever owns the loop.

:class:`.inputs.Inputs` is what could be checked before; :class:`.run.Run` is what needs them.
:mod:`.training_hooks` puts a session into ``megatron.training``, :mod:`.own_loop` into a trainer
that calls Megatron's schedules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.plan.scheduler import Scheduler, StateError
from sparsebalance_megatron.profiling.startup import shared_cost_table
from sparsebalance_megatron.training.inputs import CostedInputs, Inputs, fingerprint
from sparsebalance_megatron.training.resume import compare_runs, run_record
from sparsebalance_megatron.training.run import Run, make_scheduler

SchedulerMaker = Callable[[CostedInputs], Scheduler]


class RankDisagreementError(RuntimeError):
    """Ranks were started with different flags, data or software."""


class Session:
    """A run on one rank that :meth:`start` starts, and state that it may go on from.

    Args:
        device: where the model runs.
        after_step: called when a step has been learnt from, where :meth:`state_dict` may be kept.
        make_scheduler: gives what plans the run; the place to put another scheduler.
    """

    def __init__(
        self,
        inputs: Inputs,
        device: torch.device,
        after_step: Callable[[], None] = lambda: None,
        make_scheduler: SchedulerMaker = make_scheduler,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self._after_step = after_step
        self._make_scheduler = make_scheduler
        self._run: Run | None = None
        self._loaded_state: dict[str, Any] | None = None

    @property
    def started(self) -> bool:
        """Whether :attr:`run` exists."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The run; raises :class:`StateError` if it has not been started."""
        if self._run is None:
            raise StateError("the run has not started: ask for the training iterator first")
        return self._run

    def start(self, *, consumed_samples: int) -> Run:
        """Start the run, or give the one that has started; collective over all ranks.

        Args:
            consumed_samples: trained on before, a multiple of the global batch size.

        Raises:
            StateError, CostTableError, RankDisagreementError: on all ranks alike.
        """
        batch_size = self.inputs.settings.global_batch_size
        if consumed_samples % batch_size:
            raise StateError(
                f"the checkpoint has consumed {consumed_samples} samples, no multiple of "
                f"--global-batch-size {batch_size}; resume with another global batch size"
            )
        if self._run is None:
            self._run = self._started(resumed=consumed_samples > 0)
        return self._run

    def _started(self, *, resumed: bool) -> Run:
        inputs = self.inputs
        if not isinstance(inputs, CostedInputs):
            print_rank_0("sparse balance: measuring the model's layers on rank 0")
            table = shared_cost_table(inputs.settings.command_line or (), inputs.config.log_dir)
            inputs = inputs.with_cost(CostModel.fit(table))
        check_ranks_agree(fingerprint(inputs))
        record = run_record(inputs)
        scheduler = self._make_scheduler(inputs)
        if self._loaded_state is not None:
            _take_over(self._loaded_state, scheduler, record)
        elif resumed:
            print_rank_0(
                "sparse balance: the checkpoint has no plugin state; coverage curves and cost "
                "corrections start afresh"
            )
        print_rank_0(f"sparse balance: {inputs.train.counts.describe()}")
        return Run(
            inputs,
            scheduler,
            record=record,
            resumed=resumed,
            device=self.device,
            after_step=self._after_step,
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the number of consumed samples; plain Python types."""
        if self._run is not None:
            return self._run.scheduler.state_dict() | {"run": self._run.record}
        if self._loaded_state is None:
            raise StateError("nothing to save: the training iterator has not been asked for yet")
        return self._loaded_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier run, on every rank the same, before iterators exist.

        Raises:
            StateError: here or at the start, if it does not fit this model and layout.
        """
        self._loaded_state = state
        if self._run is not None:
            _take_over(state, self._run.scheduler, self._run.record)


def print_rank_0(message: str) -> None:
    """Print on the first rank of the default group only."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def check_ranks_agree(
    fingerprint: Mapping[str, str], group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Compare every rank's fingerprint with rank 0's; collective over the group.

    Raises:
        RankDisagreementError: on every rank alike, naming the entry, the ranks and the values.
    """
    gathered: list[Mapping[str, str]] = [{}] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, dict(fingerprint), group=group)
    for name in sorted(set().union(*gathered)):
        values = [other.get(name, "absent") for other in gathered]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            raise RankDisagreementError(
                f"{name}: rank 0 has {values[0]!r}, rank {differing[0]} has "
                f"{values[differing[0]]!r} (ranks that differ: {differing}); "
                "start every rank with the same flags, data and software"
            )


def _take_over(state: dict[str, Any], scheduler: Scheduler, record: Mapping[str, str]) -> None:
    """Go on from loaded state, and say what differs from the run that wrote it."""
    differences = compare_runs(state.get("run", record), record)
    for note in (*differences, *scheduler.load_state_dict(state)):
        print_rank_0(f"sparse balance: resumed: {note}")
