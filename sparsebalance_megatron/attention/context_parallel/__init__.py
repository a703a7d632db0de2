# SPDX-License-Identifier: Apache-2.0
"""A packed row on several ranks: who holds which block, and how keys and values travel."""
