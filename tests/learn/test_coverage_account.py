# SPDX-License-Identifier: Apache-2.0
"""The account: nothing short stays short, nothing saved is spent twice, old entries are capped."""

from __future__ import annotations

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
    assert by_sample.deficit == 0.0
    assert by_token.deficit == pytest.approx(300 * 0.2 - 100 * 0.2)


def test_what_tokens_lost_adds_up_over_steps_of_other_lengths():
    """The mean over all tokens counts, not the mean of the steps' means; also once saved."""
    account, restored = CoverageAccount(2, "tokens"), CoverageAccount(2, "tokens")
    for tokens, lost in ((4000.0, 40.0), (400.0, -30.0), (1000.0, 5.0)):
        account.update(*by_tokens(tokens, lost))
    assert account.deficit == pytest.approx(15.0)
    restored.load_state_dict(account.state_dict())
    assert restored.snapshot() == account.snapshot()


def run(size, errors, *, delay):
    """Surplus of every step, if each executes its even share of what its horizon owed, and errs.

    ``delay``: a plan knows the account without the last so many steps.
    """
    account, surplus, known = CoverageAccount(size), [], []
    for error in errors:
        known.append(account.snapshot() / (size * horizon_steps(size)))
        surplus.append(known[max(0, len(known) - 1 - delay)] + error)
        enter(account, base_mean=0.5, executed_mean=0.5 + surplus[-1])
    return surplus, account.deficit


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
    assert account.deficit == pytest.approx(0.2 * 64)
    for _ in range(100):
        enter(account, base_mean=0.1, executed_mean=0.9)
    assert account.deficit == pytest.approx(-0.2 * 64)


def test_the_reserve_is_small_where_base_budgets_cover_nearly_all():
    account = CoverageAccount(64)
    assert account.snapshot() == 0.0
    for base_mean, reserve in ((0.5, 0.01), (0.99, 0.0004)):
        enter(account, base_mean=base_mean, executed_mean=base_mean)
        assert account.snapshot() == pytest.approx(reserve * 64 / 2)


def test_slack_is_not_owed():
    account = CoverageAccount(64, slack=0.002)
    enter(account, base_mean=0.8, executed_mean=0.798)
    assert account.deficit == pytest.approx(0.0, abs=1e-12)


def test_a_saved_balance_is_taken_over():
    account, resumed = CoverageAccount(64), CoverageAccount(64)
    enter(account, base_mean=0.8, executed_mean=0.79)
    resumed.load_state_dict(account.state_dict())
    assert resumed.snapshot() == account.snapshot()
