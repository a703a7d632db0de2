# SPDX-License-Identifier: Apache-2.0
"""The glue to Megatron: the only room that imports it."""
