# SPDX-License-Identifier: Apache-2.0
"""Naive planners and attentions; only tests import them."""
