# SPDX-License-Identifier: Apache-2.0
"""Adapters to Megatron that know no run: flags, layer specs, core attention, timers."""

from sparsebalance_megatron.supported import check_megatron

check_megatron()
