# SPDX-License-Identifier: Apache-2.0
"""The trained attention inside Hugging Face models.

Importing this package registers the attention ``sparse_balance`` with ``transformers``::

    import sparsebalance_megatron.evaluate
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, attn_implementation="sparse_balance")

Its settings are those in the model's config.json (:class:`.settings.SparseAttention`), where
``sparse-balance convert to-hf`` writes them. :func:`configure` gives other settings, or settings
for a model without any.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from sparsebalance_megatron.evaluate.attention import sparse_balance_attention
from sparsebalance_megatron.evaluate.mask import document_starts
from sparsebalance_megatron.evaluate.settings import SparseAttention, configure, settings_of

NAME = "sparse_balance"
"""Value of ``attn_implementation``."""

AttentionInterface.register(NAME, sparse_balance_attention)
# Without a mask function of the same name transformers passes no mask at all.
AttentionMaskInterface.register(NAME, document_starts)

__all__ = ["NAME", "SparseAttention", "configure", "settings_of"]
