# SPDX-License-Identifier: Apache-2.0
"""The trained attention inside Hugging Face models.

Importing this package registers the attention ``sparse_balance`` with ``transformers``::

    from sparsebalance_megatron import evaluate
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, attn_implementation=evaluate.NAME)
    evaluate.configure(
        model, sparse_block_size=256, sparse_topk_blocks=32, sparse_selection="token-query-head"
    )

The settings lie in the model's config (:class:`.settings.SparseAttention`): ``save_pretrained``
writes them, and a model that has them needs no :func:`configure`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from sparsebalance_megatron.evaluate.attention import document_starts, sparse_balance_attention
from sparsebalance_megatron.evaluate.settings import SparseAttention, configure, settings_of

NAME = "sparse_balance"
"""Value of ``attn_implementation``."""

AttentionInterface.register(NAME, sparse_balance_attention)
# Without a mask function of the same name transformers passes no mask at all.
AttentionMaskInterface.register(NAME, document_starts)

__all__ = ["NAME", "SparseAttention", "configure", "settings_of"]
