# SPDX-License-Identifier: Apache-2.0
"""Libraries that are slow to import are imported once, before the time of a case is taken."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:

    import sparsebalance_megatron.convert.transfer
    import sparsebalance_megatron.profile.profile
    import sparsebalance_megatron.view.report.run_report  # noqa: F401
