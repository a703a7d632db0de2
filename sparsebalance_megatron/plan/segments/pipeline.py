# SPDX-License-Identifier: Apache-2.0
"""Makespans of pipelines whose operations are segments, of many candidates at once.

The order is that of :class:`..pipeline.orders.SegmentedSchedule`, the first P stages of 1F1B over
P + w stages. In such a pipeline every operation has a step at which it would run if all took one
step, which is known without simulating: whatever the times, an operation waits only for operations
of earlier steps. So all operations of all candidates are simulated step by step, whatever their
numbers of segments, and no graph is built, as the general simulator would need.

Shape legend: P pipeline stages, U segments of all candidates, X candidates, O operations; a leading
2: forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from sparsebalance_megatron.plan.segments.cuts import Cut


def makespans_ms(candidates: Sequence[Sequence[Cut]], slowness_XP: np.ndarray) -> np.ndarray:
    """[X] ms until the last operation of each rank ends.

    Args:
        candidates: micro-batches of a rank, in the order in which they run.
        slowness_XP: of the devices that run each candidate.
    """
    cuts = list(chain.from_iterable(candidates))
    segments = [len(cut.tokens_U) for cut in cuts]
    first = list(accumulate(map(len, candidates[:-1]), initial=0))
    segments_X = np.add.reduceat(segments, first)
    # As many as the pipeline has stages in which the order is 1F1B.
    stages_X = np.maximum.reduceat(segments, first) - 1 + slowness_XP.shape[1]
    candidate_U = np.repeat(np.arange(len(candidates)), segments_X)
    ms_2UP = np.stack(
        [
            np.concatenate([cut.forward_UP for cut in cuts]),
            np.concatenate([cut.backward_UP[::-1] for cut in cuts]),
        ]
    )
    ms_2UP *= slowness_XP[candidate_U]
    first_X = np.cumsum(segments_X) - segments_X
    end_2UP = _ends_2UP(
        ms_2UP,
        number_U1=(np.arange(len(candidate_U)) - first_X[candidate_U])[:, None],
        segments_U1=segments_X[candidate_U, None],
        stages_U1=stages_X[candidate_U, None],
    )
    return np.maximum.reduceat(end_2UP.max(axis=(0, 2)), first_X)


def _ends_2UP(
    ms_2UP: np.ndarray, *, number_U1: np.ndarray, segments_U1: np.ndarray, stages_U1: np.ndarray
) -> np.ndarray:
    """When operations end.

    Args:
        ms_2UP: backwards in the order in which they run.
        number_U1: of a rank's forwards, and of its backwards, in their order.
        segments_U1: of the rank.
        stages_U1: of the 1F1B pipeline whose first stages have its order.
    """
    stages, none = ms_2UP.shape[2], ms_2UP.size
    stage_P = np.arange(stages)
    ahead_UP = stages_U1 - 1 - stage_P
    forward_UP, backward_UP = np.arange(none).reshape(ms_2UP.shape)
    warms_up_UP = number_U1 <= ahead_UP
    step_2UP = np.stack(
        [
            np.where(warms_up_UP, number_U1, 2 * number_U1) + stage_P,
            2 * (number_U1 + stages_U1) - 1 - stage_P,
        ]
    )
    last_UP = forward_UP + (segments_U1 - 1 - number_U1) * stages
    own_2UP = np.stack(
        [
            np.where(
                warms_up_UP,
                np.where(number_U1 > 0, forward_UP - stages, none),
                backward_UP - (ahead_UP + 1) * stages,
            ),
            np.where(
                number_U1 + ahead_UP < segments_U1,
                forward_UP + ahead_UP * stages,
                np.where(number_U1 > 0, backward_UP - stages, last_UP),
            ),
        ]
    )
    other_2UP = np.stack(
        [
            np.where(stage_P > 0, forward_UP - 1, none),
            np.where(stage_P < stages - 1, backward_UP + 1, none),
        ]
    )
    step_O = step_2UP.ravel()
    order_O = np.argsort(step_O, kind="stable")
    runs_as = np.empty(none + 1, dtype=np.int64)
    runs_as[order_O], runs_as[none] = np.arange(none), none
    own_O, other_O = (runs_as[waited.ravel()[order_O]] for waited in (own_2UP, other_2UP))
    end_O = np.append(ms_2UP.ravel()[order_O], 0.0)
    edges = np.searchsorted(step_O[order_O], np.arange(step_O.max() + 2)).tolist()
    for first, end in pairwise(edges):
        ready = np.maximum(end_O.take(own_O[first:end]), end_O.take(other_O[first:end]))
        end_O[first:end] += ready
    return end_O[runs_as[:none]].reshape(ms_2UP.shape)


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
