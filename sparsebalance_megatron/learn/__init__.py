# SPDX-License-Identifier: Apache-2.0
"""Learns from steps, and plans with what was learnt."""
