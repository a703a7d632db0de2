# SPDX-License-Identifier: Apache-2.0
"""The error of everything that reads or writes training data."""

from __future__ import annotations


class DataError(ValueError):
    """A data file or record is missing, damaged or unusable; the text names it and the remedy."""
