# SPDX-License-Identifier: Apache-2.0
"""Implementations of one operation; they do not import one another."""
