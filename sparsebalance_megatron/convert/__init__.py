# SPDX-License-Identifier: Apache-2.0
"""Hugging Face weights into Megatron's names and shapes, and back. No Megatron here."""
