# SPDX-License-Identifier: Apache-2.0
"""Makespans of pipelines whose operations are segments, of many candidates at once.

The order is that of :class:`..pipeline.orders.SegmentedSchedule`, which is the same for all
pipelines of as many stages and segments whose longest micro-batches have as many segments: only the
times differ. So no graph is built for a candidate, as the general simulator would need.

Shape legend: P pipeline stages, U segments of a rank, X candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.segments.cuts import Cut


class RankTimes(NamedTuple):
    """A rank's operations: forwards in their order, backwards in theirs.

    ``further_ahead``: most segments of a micro-batch, less one.
    """

    forward_UP: np.ndarray
    backward_UP: np.ndarray
    further_ahead: int

    @classmethod
    def of(cls, cuts: Sequence[Cut]) -> RankTimes:
        """The operations of micro-batches in the order in which they run."""
        return cls(
            forward_UP=np.concatenate([cut.forward_UP for cut in cuts]),
            backward_UP=np.concatenate([cut.backward_UP[::-1] for cut in cuts]),
            further_ahead=max(len(cut.first_blocks) for cut in cuts) - 1,
        )


def makespans_ms(candidates: Sequence[RankTimes], slowness_XP: np.ndarray) -> np.ndarray:
    """[X] ms until the last operation of each rank ends.

    Args:
        slowness_XP: of the devices that run each candidate.
    """
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, times in enumerate(candidates):
        alike[len(times.forward_UP), times.further_ahead].append(index)
    ms_X = np.empty(len(candidates))
    for (segments, further_ahead), members in alike.items():
        slowness = slowness_XP[members].T[:, None]
        forward, backward = (
            np.stack([candidates[index][side] for index in members], axis=-1).transpose(1, 0, 2)
            * slowness
            for side in (0, 1)
        )
        ms_X[members] = _simulated(forward, backward, segments, further_ahead)
    return ms_X


def _simulated(
    forward_PUX: np.ndarray, backward_PUX: np.ndarray, segments: int, further_ahead: int
) -> np.ndarray:
    stages, last = len(forward_PUX), len(forward_PUX) - 1
    free_PX = np.zeros((stages, forward_PUX.shape[2]))
    forward_end, backward_end = np.empty_like(forward_PUX), np.empty_like(backward_PUX)
    for stage, number, is_forward in _running_order(stages, segments, further_ahead):
        free_X = free_PX[stage]
        if is_forward:
            if stage > 0:
                np.maximum(free_X, forward_end[stage - 1, number], out=free_X)
            free_X += forward_PUX[stage, number]
            forward_end[stage, number] = free_X
        else:
            if stage < last:
                np.maximum(free_X, backward_end[stage + 1, number], out=free_X)
            free_X += backward_PUX[stage, number]
            backward_end[stage, number] = free_X
    return np.asarray(free_PX.max(axis=0))


@lru_cache(maxsize=512)
def _running_order(
    stages: int, segments: int, further_ahead: int
) -> tuple[tuple[int, int, bool], ...]:
    """(stage, number among the stage's forwards or backwards, whether it is a forward) of every
    operation, after all that it waits for.

    A stage runs its forwards ahead, then forward and backward in turn. Step by step: forward n of
    stage p is at step 2 n + p while it runs ahead; all later ones follow from what they wait for.
    """
    orders = []
    for stage in range(stages):
        ahead = min(segments, stages - 1 - stage + further_ahead)
        order = [(number, True) for number in range(ahead)]
        for number in range(segments - ahead):
            order += [(ahead + number, True), (number, False)]
        order += [(number, False) for number in range(segments - ahead, segments)]
        orders.append(order)
    position, done = [0] * stages, [[-1, -1] for _ in range(stages)]
    running: list[tuple[int, int, bool]] = []
    while len(running) < 2 * segments * stages:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                number, is_forward = order[position[stage]]
                source = stage - 1 if is_forward else stage + 1
                if 0 <= source < stages and done[source][is_forward] < number:
                    break
                done[stage][is_forward] = number
                running.append((stage, number, is_forward))
                position[stage] += 1
    return tuple(running)


def most_tokens_in_flight(tokens_MU: Sequence[np.ndarray], stages: int) -> int:
    """Tokens of segments whose backward has not ended, at most, on a stage.

    Args:
        tokens_MU: of every segment of every micro-batch, in the order in which they run.
        stages: from this one to the last.
    """
    forward_U = np.concatenate(tokens_MU)
    backward_U = np.concatenate([tokens_U[::-1] for tokens_U in tokens_MU])
    ahead = stages - 1 + max(map(len, tokens_MU)) - 1
    gone_U = np.concatenate([np.zeros(ahead, dtype=np.int64), np.cumsum([0, *backward_U])])
    return int((np.cumsum(forward_U) - gone_U[: len(forward_U)]).max())
