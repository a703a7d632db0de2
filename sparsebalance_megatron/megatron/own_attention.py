# SPDX-License-Identifier: Apache-2.0
"""The model's own core attention for documents that are attended to densely: heads travel around it
where ranks share their packed sequence."""

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.config import ConfigError, flag_name
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch


class SharesHeads:
    """Mixed into a core attention that takes packed sequences in the thd layout, such as
    Transformer Engine's.

    Of a sequence that W ranks share it gets all tokens, plain boundaries and a W-th of its heads,
    as on a model of so many heads without context parallelism. An instance for each W is made when
    it is first asked for, outside of the module tree: checkpoints keep their keys.
    """

    training: bool
    _made_of: tuple[Any, tuple[Any, ...], dict[str, Any]]
    _of_ranks: dict[int, Any]

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        if config.softmax_type == "learnable":
            raise ConfigError(
                "--sparse-balance-mode exact with --softmax-type learnable: each head's parameter "
                f"stays on every rank; use {flag_name('max_context_parallel')} 1 and "
                "--context-parallel-size 1, or --transformer-impl local"
            )
        # With more, it would exchange keys and values itself.
        alone = _changed(config, context_parallel_size=1)
        super().__init__(alone, *arguments, **keywords)  # type: ignore[call-arg]
        self.__dict__["_made_of"] = alone, arguments, keywords
        self.__dict__["_of_ranks"] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        packed_seq_params: Any = None,
        **keywords: Any,
    ) -> Any:
        context: LocalMicroBatch | None = getattr(packed_seq_params, "micro_batch", None)
        if context is None or context.sequence is None:
            whole = super().forward  # type: ignore[misc]
            return whole(
                *(query, key, value, attention_mask, *arguments),
                packed_seq_params=packed_seq_params,
                **keywords,
            )
        padding = context.sequence.padding_tokens
        qkv = [(x if x.ndim == 3 else x[:, 0])[: len(x) - padding] for x in (query, key, value)]
        of_member = partial(
            self.of_documents, context=context.of_member, layout=context.layout, **keywords
        )
        out_T = context.travelling(context.layout.tokens).attend(qkv, of_member).flatten(1)
        if padding:
            out_T = torch.nn.functional.pad(out_T, (0, 0, 0, padding))
        # Multi-latent attention gives three dimensions in either layout.
        return out_T if packed_seq_params.qkv_format == "thd" else out_T[:, None]

    def of_documents(
        self, *qkv: Tensor, context: LocalMicroBatch, layout: PackedLayout, **keywords: Any
    ) -> Tensor:
        """[T, H * F] of the first documents of a micro-batch, from queries, keys and values of its
        heads.

        Args:
            layout: of these documents.
            keywords: what Megatron gives besides.
        """
        keywords["attn_mask_type"] = AttnMaskType.padding_causal
        keywords["packed_seq_params"] = context.plain_params(layout.documents)
        return self._of(context.heads_of.members)(*qkv, None, **keywords)

    def _of(self, ranks: int) -> Any:
        """Attention of the heads that each of so many ranks has."""
        if ranks == 1:
            return super().forward  # type: ignore[misc]
        if ranks not in self._of_ranks:
            config, arguments, keywords = self._made_of
            config = _changed(
                config,
                num_attention_heads=config.num_attention_heads // ranks,
                num_query_groups=max(
                    config.num_query_groups // ranks, config.tensor_model_parallel_size
                ),
            )
            own = type(self).__mro__[2]
            self._of_ranks[ranks] = own(config, *arguments, **keywords)
        return self._of_ranks[ranks].train(self.training)


def _changed(config: Any, **changes: Any) -> Any:
    """A shallow copy of a config with other values, not checked anew."""
    changed = copy.copy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def sharing_heads(core_attention: Any) -> Any:
    """The builder of a core attention, a class or a ``ModuleSpec``, with heads that travel."""
    if isinstance(core_attention, ModuleSpec):
        module = sharing_heads(core_attention.module)
        return ModuleSpec(
            module=module, params=core_attention.params, submodules=core_attention.submodules
        )
    return type(core_attention.__name__, (SharesHeads, core_attention), {})
