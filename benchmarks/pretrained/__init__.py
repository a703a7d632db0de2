# SPDX-License-Identifier: Apache-2.0
"""A pretrained model read sparsely: documents, arms, budgets by layer, measures."""
