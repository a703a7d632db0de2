# SPDX-License-Identifier: Apache-2.0
"""Paired training steps of several variants: what ``benchmarks/end_to_end.py`` is made of."""
