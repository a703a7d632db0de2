# SPDX-License-Identifier: Apache-2.0
"""Quality of models trained under budgets; ``benchmarks/quality.py`` starts it."""
