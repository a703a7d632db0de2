# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch costs, in ms: measured tables, a fitted model, online correction."""
