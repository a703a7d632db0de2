# SPDX-License-Identifier: Apache-2.0
"""Measures a model's layers for the cost table."""
