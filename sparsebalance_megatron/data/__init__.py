# SPDX-License-Identifier: Apache-2.0
"""From documents to packed micro-batches: preparation, the sample index, packing."""
