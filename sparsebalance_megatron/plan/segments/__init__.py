# SPDX-License-Identifier: Apache-2.0
"""Plans micro-batches that pass the pipeline in segments."""
