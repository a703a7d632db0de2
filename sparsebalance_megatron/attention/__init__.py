# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with budgets. Knows nothing of Megatron or plans; ranks, in one folder."""
