# SPDX-License-Identifier: Apache-2.0
"""How much attention every sample gets in every layer."""
