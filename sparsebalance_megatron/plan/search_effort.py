# SPDX-License-Identifier: Apache-2.0
"""Planning time as a count of simulated operations, so that every rank searches equally far."""

OPERATIONS_PER_MS = 80_000
"""Forwards and backwards of one chunk and micro-batch that numpy simulates in a ms on one core of a
2020s server CPU. A constant, not a measurement: ranks must agree on it to the last bit."""

SEGMENT_COST = 16
"""Cost of a simulated operation of a segment over one of a micro-batch: it is cut, too, and
candidates differ in their operations."""

WAITING_COST = 4
"""Cost of a simulated operation where ranks wait for one another, over one where none wait."""

_CALL_OPERATIONS = 4_000
"""What a call of the simulator costs beside its operations."""


class SearchEffort:
    """Operations that a search may still simulate.

    A clock would stop ranks at different moments, and they would run different plans. Instead
    ``plan_ms`` buys a fixed number of simulated operations; a slower machine takes longer over
    them, and finds the same plan.
    """

    def __init__(self, plan_ms: float) -> None:
        self.bought = self.operations = plan_ms * OPERATIONS_PER_MS

    def limit(self, operations: int) -> None:
        """Give up what is left beyond so many operations."""
        self.operations = min(self.operations, operations)
        self.bought = min(self.bought, operations)

    @property
    def left(self) -> float:
        """Share of the operations that may still be spent."""
        return max(self.operations, 0.0) / self.bought if self.bought else 0.0

    def affordable(self, operations_each: int) -> int:
        """Pipelines of so many operations that one more call may simulate."""
        return max(0, int((self.operations - _CALL_OPERATIONS) // operations_each))

    def spend(self, operations: int) -> None:
        """Count one call of the simulator."""
        self.operations -= operations + _CALL_OPERATIONS
