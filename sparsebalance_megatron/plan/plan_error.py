# SPDX-License-Identifier: Apache-2.0
"""The error of all planning."""


class PlanError(ValueError):
    """No plan exists, or a plan breaks one of its invariants."""
