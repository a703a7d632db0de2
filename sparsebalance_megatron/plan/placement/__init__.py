# SPDX-License-Identifier: Apache-2.0
"""Places samples: balance and search."""
