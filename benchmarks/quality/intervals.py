# SPDX-License-Identifier: Apache-2.0
"""Means over seeds with 95 % intervals of Student's t, and differences paired by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over ``count`` seeds and half the width of its interval; NaN for a single seed."""

    mean: float
    half_width: float
    count: int

    def text(self, *, scale: float = 1.0, digits: int = 1, sign: bool = False) -> str:
        """For a table."""
        form = f"{'+' if sign else ''}.{digits}f"
        mean = format(self.mean * scale, form)
        if math.isnan(self.half_width):
            return mean
        return f"{mean} ± {self.half_width * scale:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and interval of values that are alike but for the seed.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    half_width = math.nan
    if len(values) > 1:
        quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        half_width = quantile * stdev(values) / math.sqrt(len(values))
    return Interval(mean=fmean(values), half_width=half_width, count=len(values))


def of_arm(arm: Mapping[str, Any], figure: str) -> Interval | None:
    """Interval of an arm's figure over its seeds; None where it has none."""
    known = [value for value in arm[figure] if value is not None]
    return interval(known) if known else None


def difference(
    arm: Mapping[str, Any], references: Sequence[Mapping[str, Any]], figure: str
) -> Interval | None:
    """Arm less the mean of the references that have its seed, by seed; None without a common
    one."""
    mine, *theirs = (
        {
            seed: value
            for seed, value in zip(each["seeds"], each[figure], strict=True)
            if value is not None
        }
        for each in (arm, *references)
    )
    known = {seed: [each[seed] for each in theirs if seed in each] for seed in mine}
    differences = [mine[seed] - fmean(values) for seed, values in known.items() if values]
    return interval(differences) if differences else None
