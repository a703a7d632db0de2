# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of step times over everything that a plan may choose."""
