# SPDX-License-Identifier: Apache-2.0
"""Which sample runs where, when, and with which budget. Imports no torch and no Megatron."""
