# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks run the same thing, and a resumed run what it ran before: software and data
at the start, the plan of each step.

The reduction at a step's end compares the plans of all ranks. Ranks that may share a micro-batch
compare plans before the step, since one that planned otherwise would wait inside attention for a
member that never comes.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import DistStoreError, ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.run.step_reducer import differing_ranks, digest_number

_SHOWN_RANKS = 8
_SAMPLES = "training samples"
_WHAT_SAMPLES_FOLLOW = (
    "the files, --split, --seq-length, --seed or --sparse-balance-overlong changed"
)
_SHOWN_CHARACTERS = 80
"""Longest text of an error."""
_LONGEST_LAG = timedelta(seconds=10)
_ANNOUNCED = "sparse_balance/announced/{}"


class RankDisagreementError(ValueError):
    """Ranks were started with different flags, data or software."""


class PlanMismatchError(RuntimeError):
    """Ranks computed different plans for the same step."""


def check_shared_plan(step: int, digest: bytes, group: ProcessGroup) -> None:
    """Compare a step's plan among the ranks that may share micro-batches; collective, on the host.
    Raises a :class:`PlanMismatchError` on all of them if two plans differ."""
    numbers = _gathered([digest_number(digest)], torch.device("cpu"), group)
    if differing := differing_ranks(numbers[:, 0]):
        members = torch.distributed.get_process_group_ranks(group)
        raise PlanMismatchError(
            f"step {step}: ranks {[members[place] for place in differing]} planned another step "
            f"than rank {members[0]}, with which they may share micro-batches; check that "
            "all ranks run the same software on the same data"
        )


def check_executed_plans(problem: bool, digest: bytes, device: torch.device) -> tuple[int, ...]:
    """Ranks that have a ``problem``: they did not execute a whole step; collective over all ranks.

    Raises:
        PlanMismatchError: on all ranks alike, if none has a problem and two plans differ.
    """
    problems, numbers = _gathered([int(problem), digest_number(digest)], device).T
    failing = tuple(np.flatnonzero(problems).tolist())
    differing = differing_ranks(numbers)
    if differing and not failing:
        raise PlanMismatchError(
            f"ranks {shown(differing)} executed another plan than rank 0; make plans from the "
            "same lengths in the same order on all ranks, or on one that sends them"
        )
    return failing


def _gathered(
    values: list[int], device: torch.device, group: ProcessGroup | None = None
) -> np.ndarray:
    """[rank, value] of all ranks of the group; collective."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    ranks = torch.distributed.get_world_size(group)
    everyone = torch.empty(ranks * len(values), dtype=torch.int64, device=device)
    torch.distributed.all_gather_into_tensor(everyone, own, group=group)
    return everyone.cpu().numpy().reshape(ranks, -1)


def shown(values: Sequence[int]) -> str:
    """The first few values of a message."""
    listed = ", ".join(map(str, values[:_SHOWN_RANKS]))
    return f"{listed}, ..." if len(values) > _SHOWN_RANKS else listed


def gather_or_raise[T](work: Callable[[], T], error_type: type[ValueError]) -> list[T]:
    """Results of ``work`` on every rank; an error of one rank is raised on all of them."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = work(), None
    except error_type as error:
        outcome = None, str(error)
    outcomes = _gathered_objects(outcome)
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise error_type(f"{problem} (rank {rank})")
    return [result for result, _ in outcomes]


def _gathered_objects(own: Any) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def announce_rank() -> None:
    """Let other ranks know, in the store of the process groups, that this one has the plugin on."""
    _get_default_store().set(_ANNOUNCED.format(torch.distributed.get_rank()), "")


def check_neighbor_announced() -> None:
    """Raise a :class:`RankDisagreementError` where the rank before this one has the plugin off, and
    would never enter its collectives. Some rank raises wherever one has; Megatron has a barrier
    between their announcement, where models are built, and this check."""
    before = (torch.distributed.get_rank() - 1) % torch.distributed.get_world_size()
    try:
        _get_default_store().wait([_ANNOUNCED.format(before)], _LONGEST_LAG)
    except DistStoreError:
        raise RankDisagreementError(
            f"--sparse-balance: rank {before} was started without it; give all ranks the same flags"
        ) from None


def check_ranks_agree(fingerprint: Mapping[str, str]) -> None:
    """Compare every rank's fingerprint with rank 0's; collective. Raises a
    :class:`RankDisagreementError` on all of them, naming entries, ranks and values."""
    gathered = _gathered_objects(dict(fingerprint))
    found = []
    for name in sorted(set().union(*gathered)):
        values = [other.get(name, "absent") for other in gathered]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            found.append(
                f"{name}: rank 0 has {values[0]!r}, rank {differing[0]} has "
                f"{values[differing[0]]!r} (ranks that differ: {differing})"
            )
    if found:
        raise RankDisagreementError(
            f"{'; '.join(found)}; start every rank with the same flags, data and software"
        )


def print_rank_0(*lines: str) -> None:
    """Print on the first rank of the default group only."""
    if torch.distributed.get_rank() == 0:
        for line in lines:
            print(f"sparse balance: {line}", flush=True)


def compare_runs(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Differences from the run that wrote the checkpoint, one sentence each; all of them allowed.

    Raises:
        StateError: if the training samples differ, in which a run finds its place by their number.
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


def take_over(state: dict[str, Any], scheduler: Scheduler, record: Mapping[str, str]) -> None:
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
    print_rank_0(*(f"resumed: {note}" for note in notes))
