# SPDX-License-Identifier: Apache-2.0
"""Which sample runs where: balance and search."""
