# SPDX-License-Identifier: Apache-2.0
"""Chooses the budget of every sample in every layer."""
