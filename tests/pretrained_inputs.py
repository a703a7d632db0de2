# SPDX-License-Identifier: Apache-2.0
"""Documents, a tiny model and random queries, for tests of the pretrained model's benchmark."""

import torch
from pretrained.documents import Document, make_documents
from pretrained.reading import Asked, Reader
from sparse_hf_models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout

VOCABULARY, TOKENS, BLOCK, LAYERS = 300, 512, 16, 3


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [min(ord(each), VOCABULARY - 1) for each in text]


def documents(kind: str, how_many: int = 2, **settings: bool) -> list[Document]:
    return make_documents(kind, TOKENS, how_many, encode, seed=0, **settings)


def tiny_model() -> LlamaForCausalLM:
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "head_dim": 16}
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()


def tiny_reader() -> Reader:
    return Reader(tiny_model())


def asked_of(blocks: int, size: int, seed: int = 0) -> Asked:
    generator = torch.Generator().manual_seed(seed)
    q_QHD = torch.randn(blocks * size, 4, 8, generator=generator)
    k_TGD = torch.randn(blocks * size, 2, 8, generator=generator)
    layouts = LayoutPair.within(packed_layout((0, blocks * size), size, "cpu"))
    return Asked(
        layer=0,
        q_QHD=q_QHD,
        k_TGD=k_TGD,
        layouts=layouts,
        softmax_scale=8**-0.5,
    )
