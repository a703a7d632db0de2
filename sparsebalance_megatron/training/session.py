# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank, before and after process groups exist, whoever owns the loop.

:class:`.inputs.Inputs` is what could be checked before; :class:`.run.Run` is what needs them.
:mod:`.training_hooks` puts a session into ``megatron.training``, :mod:`.own_loop` into a trainer
that calls Megatron's schedules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.profiling.startup import shared_cost_table
from sparsebalance_megatron.telemetry.log_directory import LogDirectory, LogDirectoryError
from sparsebalance_megatron.training.inputs import (
    CostedInputs,
    Inputs,
    check_batch_sizes,
    fingerprint,
    processor,
)
from sparsebalance_megatron.training.recompute import recompute_line
from sparsebalance_megatron.training.resume import compare_runs, run_record
from sparsebalance_megatron.training.run import Run, make_scheduler

_SHOWN_CHARACTERS = 80

SchedulerMaker = Callable[[CostedInputs], Scheduler]


class RankDisagreementError(ValueError):
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
        self._log_directory: LogDirectory | None = None

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

    def start(self, *, consumed_samples: int, iteration: int | None = None) -> Run:
        """Start the run, or give the one that has started; collective over all ranks.

        Args:
            consumed_samples: trained on before; a step must begin there.
            iteration: steps trained before, as the trainer counts them; None for a trainer that
                does not say. With another global batch size than now, it is not what the samples
                make.

        Raises:
            StateError, CostTableError, RankDisagreementError, LogDirectoryError: on all ranks
                alike.
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
        check_batch_sizes(settings, steps)
        if self._run is None:
            if iteration is None:
                iteration = (self._loaded_state or {}).get("iteration", steps)
            self._run = self._started(resumed=consumed_samples > 0, extra_steps=iteration - steps)
        return self._run

    def _started(self, *, resumed: bool, extra_steps: int) -> Run:
        inputs = self.inputs
        if not isinstance(inputs, CostedInputs):
            print_rank_0("sparse balance: measuring the model's layers on rank 0")
            table = shared_cost_table(inputs.settings.command_line or (), inputs.config.log_dir)
            inputs = inputs.with_cost(CostModel.fit(table))
        check_ranks_agree(fingerprint(inputs), {"processor": processor()})
        if inputs.config.log_dir is not None:
            self._log_directory = LogDirectory(inputs.config.log_dir)
            prepare_log_directory(self._log_directory, keep_in_place=resumed)
        record = run_record(inputs)
        scheduler = self._make_scheduler(inputs)
        if self._loaded_state is not None:
            _take_over(self._loaded_state, scheduler, record)
        elif resumed:
            print_rank_0(
                "sparse balance: the checkpoint has no plugin state; coverage curves and cost "
                "corrections start afresh"
            )
        for line in inputs.train.describe():
            print_rank_0(f"sparse balance: {line}")
        recompute = recompute_line(inputs)
        if recompute is not None:
            print_rank_0(f"sparse balance: {recompute}")
        return Run(
            inputs,
            scheduler,
            record=record,
            resumed=resumed,
            extra_steps=extra_steps,
            device=self.device,
            after_step=self._after_step,
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the number of consumed samples; plain Python types."""
        if self._run is not None:
            state = self._run.scheduler.state_dict()
            steps = self.inputs.settings.batch_sizes.step_at(state["consumed_samples"])
            assert steps is not None, "the scheduler counts by the same sizes"
            return state | {
                "run": self._run.record,
                "iteration": steps + self._run.extra_steps,
            }
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


def prepare_log_directory(
    directory: LogDirectory,
    *,
    keep_in_place: bool,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Claim the directory and move an earlier run's logs out of the way; collective over the group.

    Args:
        keep_in_place: the run goes on with the logs that are there.

    Raises:
        LogDirectoryError: on every rank alike, if one of them cannot write there, or another run
            does.
    """
    claims = torch.distributed.get_rank(group) == 0

    def make() -> int:
        directory.make(claim=claims)
        return 0 if keep_in_place else directory.number_for_earlier_logs()

    # Ranks of other hosts may see another disk.
    number = max(_on_all_ranks(make, group))
    if number:
        (kept, *_) = _on_all_ranks(lambda: directory.set_aside(number), group)
        print_rank_0(f"sparse balance: logs of an earlier run are kept in {kept}")


def _on_all_ranks[T](
    work: Callable[[], T], group: torch.distributed.ProcessGroup | None
) -> list[T]:
    """What ``work`` gives on every rank; where it fails on one, its error is raised on all."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = work(), None
    except LogDirectoryError as error:
        outcome = None, str(error)
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(outcomes, outcome, group=group)
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise LogDirectoryError(f"{problem} (rank {rank})")
    return [result for result, _ in outcomes]


def check_ranks_agree(
    fingerprint: Mapping[str, str],
    circumstances: Mapping[str, str] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Compare every rank's fingerprint with rank 0's; collective over the group.

    Args:
        circumstances: what may differ, and may be why the fingerprint does.

    Raises:
        RankDisagreementError: on every rank alike, naming the entries, the ranks and the values.
    """
    gathered: list[tuple[Mapping[str, str], Mapping[str, str]]]
    gathered = [({}, {})] * torch.distributed.get_world_size(group)
    mine = dict(fingerprint), dict(circumstances or {})
    torch.distributed.all_gather_object(gathered, mine, group=group)
    differences = _differences([entries for entries, _ in gathered])
    if differences:
        differences += _differences([entries for _, entries in gathered])
        raise RankDisagreementError(
            f"{'; '.join(differences)}; start every rank with the same flags, data and software"
        )


def _differences(gathered: Sequence[Mapping[str, str]]) -> list[str]:
    """Entries that are not alike on all ranks, one phrase each."""
    found = []
    for name in sorted(set().union(*gathered)):
        values = [other.get(name, "absent") for other in gathered]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            ours, theirs = _where_they_differ(values[0], values[differing[0]])
            found.append(
                f"{name}: rank 0 has {ours!r}, rank {differing[0]} has {theirs!r} (ranks that "
                f"differ: {differing})"
            )
    return found


def _where_they_differ(first: str, second: str) -> tuple[str, str]:
    """Both texts, or of long ones what begins shortly before their first difference."""
    if max(len(first), len(second)) <= _SHOWN_CHARACTERS:
        return first, second
    pairs = zip(first, second, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = max(0, alike - _SHOWN_CHARACTERS // 2)
    return first[start : start + _SHOWN_CHARACTERS], second[start : start + _SHOWN_CHARACTERS]


def _take_over(state: dict[str, Any], scheduler: Scheduler, record: Mapping[str, str]) -> None:
    """Go on from loaded state, and say what differs from the run that wrote it.

    Raises:
        StateError: if it cannot be continued, or is damaged.
    """
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
