# SPDX-License-Identifier: Apache-2.0
"""A packed sequence on several ranks: who holds which block, and how keys and values travel."""
