# SPDX-License-Identifier: Apache-2.0
"""What a run writes and what reads it back: one file per format."""
