# SPDX-License-Identifier: Apache-2.0
"""Reads what training wrote and shows it."""
