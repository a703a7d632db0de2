# SPDX-License-Identifier: Apache-2.0
"""What is learnt from steps, and planning with it."""
