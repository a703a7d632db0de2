# SPDX-License-Identifier: Apache-2.0
"""The account: nothing short stays short, nothing saved is spent twice, old entries are capped."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import step_measurement

from sparsebalance_megatron.learn.coverage_account import CoverageAccount
from sparsebalance_megatron.plan.budgets.price import horizon_steps

NO_TIMES = np.zeros((2, 1, 1, 1, 1))
SIZES = st.sampled_from([1, 8, 24, 64, 512])


def enter(account, *, base_mean, executed_mean):
    """A step of the account's samples, all of one coverage, and one layer."""
    planned = SimpleNamespace(samples=range(account._samples))
    sums = {"executed_sum": executed_mean, "base_sum": base_mean, "count": 1.0}
    account.update(planned, step_measurement(NO_TIMES, **sums))


def by_tokens(tokens, lost_tokens):
    """A step of two samples and one layer."""
    sums = {"executed_sum": 1.0, "base_sum": 1.0, "count": 2.0}
    measured = step_measurement(NO_TIMES, **sums, tokens=tokens, lost_tokens=lost_tokens)
    return SimpleNamespace(samples=range(2)), measured


def test_tokens_may_count_instead_of_samples():
    """A long sample that lost 0.2 weighs three times a short one that gained 0.2."""
    by_sample, by_token = CoverageAccount(2), CoverageAccount(2, "tokens")
    for account in (by_sample, by_token):
        account.update(*by_tokens(400.0, 300 * 0.2 - 100 * 0.2))
    assert by_sample.deficit_B == 0.0
    assert by_token.deficit_B == pytest.approx(300 * 0.2 - 100 * 0.2)


def test_what_tokens_lost_adds_up_over_steps_of_other_lengths():
    """The mean over all tokens counts, not the mean of the steps' means; also once saved."""
    account, restored = CoverageAccount(2, "tokens"), CoverageAccount(2, "tokens")
    for tokens, lost in ((4000.0, 40.0), (400.0, -30.0), (1000.0, 5.0)):
        account.update(*by_tokens(tokens, lost))
    assert account.deficit_B == pytest.approx(15.0)
    restored.load_state_dict(account.state_dict())
    assert restored.snapshot() == account.snapshot()


def by_length(account, counts_U, lost_U, base=0.8):
    """A step of so many samples and one layer that lost coverage by length."""
    counts_U, lost_U = np.array(counts_U, dtype=float), np.array(lost_U)
    lengths_3U = np.array([(base - lost_U) * counts_U, base * counts_U, counts_U])
    executed, at_base, count = lengths_3U.sum(axis=1)
    sums = {"executed_sum": executed, "base_sum": at_base, "count": count}
    planned = SimpleNamespace(samples=range(int(count)))
    account.update(planned, step_measurement(NO_TIMES, **sums, lengths_3U=lengths_3U))


def lengths_account(**changes):
    """An account of two means: of the two shorter length buckets, and of the longest."""
    return CoverageAccount(8, "length-buckets", mean_of_U=np.array([0, 0, 1]), **changes)


def test_every_length_has_a_deficit_of_its_own():
    account = lengths_account()
    by_length(account, [3, 3, 2], [0.01, -0.03, 0.1])
    by_length(account, [8, 0, 0], [0.02, 0.0, 0.0])
    assert account.deficit_B == pytest.approx([3 * (0.01 - 0.03) + 8 * 0.02, 2 * 0.1])
    loose = lengths_account(slack=0.01)
    by_length(loose, [3, 3, 2], [0.01, 0.01, 0.01])
    assert loose.deficit_B == pytest.approx([0.0, 0.0], abs=1e-12)


def test_one_sample_of_a_rare_length_may_owe_as_much_as_others():
    account = lengths_account()
    for _ in range(40):
        by_length(account, [8, 0, 0], [0.0, 0.0, 0.0])
    assert account.snapshot() == pytest.approx([0.008 * 64, 0.0])
    for _ in range(2):
        by_length(account, [7, 0, 1], [0.0, 0.0, 0.15])
    assert account.deficit_B == pytest.approx([0.0, 0.3])
    for _ in range(40):
        by_length(account, [8, 0, 0], [0.0, 0.0, 0.0])
    assert account.deficit_B == pytest.approx([0.0, 0.2])


def test_a_saved_account_of_lengths_is_taken_over_and_no_other():
    account, resumed = lengths_account(), lengths_account()
    by_length(account, [3, 3, 2], [0.01, -0.03, 0.1])
    resumed.load_state_dict(json.loads(json.dumps(account.state_dict())))
    for each in (account, resumed):
        by_length(each, [4, 4, 0], [0.0, 0.02, 0.0])
    assert resumed.state_dict() == account.state_dict()
    assert (resumed.snapshot() == account.snapshot()).all()
    with pytest.raises(ValueError, match="holds 1 means of coverage, this run 2"):
        resumed.load_state_dict(CoverageAccount(8).state_dict())
    assert resumed.state_dict() == account.state_dict()


@pytest.mark.parametrize("base_mean", [None, 0.8])
def test_an_account_of_an_older_release_is_taken_over(base_mean):
    """It held numbers, not lists."""
    account = CoverageAccount(64)
    account.load_state_dict({"deficit": 0.3, "sample_weight": 1.0, "base_mean": base_mean})
    reserve = 0.0 if base_mean is None else 0.04 * 0.2 * 64
    assert account.snapshot() == pytest.approx([(0.3 + reserve) / 2])


def run(size, errors, *, delay):
    """Surplus of every step, if each executes its even share of what its horizon owed, and errs.

    ``delay``: a plan knows the account without the last so many steps.
    """
    account, surplus, known = CoverageAccount(size), [], []
    for error in errors:
        known.append(account.snapshot()[0] / (size * horizon_steps(size)))
        surplus.append(known[max(0, len(known) - 1 - delay)] + error)
        enter(account, base_mean=0.5, executed_mean=0.5 + surplus[-1])
    return surplus, account.deficit_B[0]


@given(SIZES, st.floats(-0.04, 0.04), st.sampled_from([0, 1]))
def test_one_error_is_made_up_for_and_a_reserve_remains(size, error, delay):
    quiet = 60 * horizon_steps(size)
    surplus, balance = run(size, [error] + [0.0] * quiet, delay=delay)
    assert sum(surplus) * size == pytest.approx(-balance)
    assert -balance == pytest.approx(0.01 * size * horizon_steps(size), rel=1e-3)


@given(SIZES, st.floats(-0.01, 0.01), st.sampled_from([0, 1]))
def test_a_lasting_error_is_balanced(size, error, delay):
    """Estimates that are always off leave the balance off, and coverage right."""
    surplus, _ = run(size, [error] * (100 * horizon_steps(size)), delay=delay)
    assert surplus[-1] == pytest.approx(0.0, abs=1e-4)


def test_what_lies_long_back_is_capped():
    account = CoverageAccount(64)
    for _ in range(100):
        enter(account, base_mean=0.9, executed_mean=0.1)
    assert account.deficit_B == pytest.approx(0.2 * 64)
    for _ in range(100):
        enter(account, base_mean=0.1, executed_mean=0.9)
    assert account.deficit_B == pytest.approx(-0.2 * 64)


def test_the_reserve_is_small_where_base_budgets_cover_nearly_all():
    account = CoverageAccount(64)
    assert account.snapshot() == 0.0
    for base_mean, reserve in ((0.5, 0.01), (0.99, 0.0004)):
        enter(account, base_mean=base_mean, executed_mean=base_mean)
        assert account.snapshot() == pytest.approx(reserve * 64 / 2)


def test_slack_is_not_owed():
    account = CoverageAccount(64, slack=0.002)
    enter(account, base_mean=0.8, executed_mean=0.798)
    assert account.deficit_B == pytest.approx(0.0, abs=1e-12)


def test_a_saved_balance_is_taken_over():
    account, resumed = CoverageAccount(64), CoverageAccount(64)
    enter(account, base_mean=0.8, executed_mean=0.79)
    resumed.load_state_dict(account.state_dict())
    assert resumed.snapshot() == account.snapshot()
