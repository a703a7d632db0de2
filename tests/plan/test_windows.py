# SPDX-License-Identifier: Apache-2.0
"""Windows are permutations of their places, dealt as their rule says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import random_lengths

from sparsebalance_megatron.plan.windows import Windows, window_places

shares = st.sampled_from([0.25, 0.5])


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of a window's samples, many of them equal, and its steps."""
    steps, size = draw(st.integers(1, 16)), draw(st.integers(1, 9))
    length = st.integers(1, 4) | st.integers(1, 2**40)
    return draw(st.lists(length, min_size=steps * size, max_size=steps * size)), steps


def one_by_one(lengths: list[int], steps: int, share: float) -> list[list[int]]:
    """Samples of each step, in no order of steps: the rule, a sample at a time."""
    size = len(lengths) // steps
    gathered = max(1, int(size * share))
    waiting = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    held = [[waiting.pop(0) for _ in range(gathered)] for _ in range(steps)]
    for place in waiting:
        free = [own for own in held if len(own) < size]
        min(free, key=lambda own: sum(lengths[each] for each in own)).append(place)
    return sorted(map(sorted, held))


@given(window=windows(), share=shares, first=st.integers(0, 2**40), seed=st.integers(0, 2**31))
def test_every_place_is_dealt_once_by_the_rule(
    window: tuple[list[int], int], share: float, first: int, seed: int
) -> None:
    lengths, steps = window
    dealt = window_places(np.array(lengths), steps, share=share, first_sample=first, seed=seed)
    assert dealt.shape == (steps, len(lengths) // steps)
    if steps == 1:
        assert dealt[0].tolist() == list(range(len(lengths)))
    assert sorted(dealt.tolist()) == one_by_one(lengths, steps, share)
    again = window_places(np.array(lengths), steps, share=share, first_sample=first, seed=seed)
    assert np.array_equal(dealt, again)


def test_the_order_of_steps_follows_from_the_seed_and_the_place() -> None:
    """The step with the longest samples is each of the four about equally often."""
    lengths = np.array(random_lengths(64, 3))
    longest = int(lengths.argmax())

    def step_of_the_longest(**drawn: int) -> int:
        return int(np.argwhere(window_places(lengths, 4, **drawn) == longest)[0, 0])

    by_place = [step_of_the_longest(first_sample=64 * each, seed=1) for each in range(200)]
    by_seed = [step_of_the_longest(seed=each) for each in range(200)]
    for drawn in (by_place, by_seed):
        assert all(30 <= drawn.count(step) <= 70 for step in range(4))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_tokens_stay_as_equal_as_the_share_allows(share: float) -> None:
    """A quarter leaves enough short samples to make up for the long ones."""
    lengths = np.random.default_rng(1).lognormal(8.0, 0.8, (32, 64))
    arrived = np.clip(lengths, 1, 20_000).astype(np.int64)
    dealt = Windows(4, share, 1).dealt(arrived.tolist())
    for first in range(0, 32, 4):
        own = slice(first, first + 4)
        assert sorted(arrived[own].ravel()) == sorted(np.ravel(dealt[own]))
    longest_S = [max(batch) for batch in dealt]
    assert np.mean(longest_S) < np.mean(arrived.max(axis=1))
    if share == 0.25:
        assert np.std(np.sum(dealt, axis=1)) < np.std(arrived.sum(axis=1))


def test_a_last_window_may_have_fewer_steps() -> None:
    batches = np.arange(1, 45).reshape(11, 4).tolist()
    assert Windows(1, 0.25, 5).dealt(batches) == tuple(map(tuple, batches))
    dealt = Windows(4, 0.25, 5).dealt(batches)
    assert len(dealt) == 11
    assert sorted(np.ravel(dealt[8:])) == list(range(33, 45))
