# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for selections by query block. Imported only where they are used."""
