# SPDX-License-Identifier: Apache-2.0
"""Cost of micro-batches in ms: measured tables, a fitted model, online correction."""
