# SPDX-License-Identifier: Apache-2.0
"""The model ``sparse-balance`` of lm-evaluation-harness: its ``hf`` model with sparse attention.

::

    python -m sparsebalance_megatron.evaluate --model sparse-balance \\
        --model_args pretrained=DIRECTORY --tasks wikitext

Versions after 0.4.13 find it by its entry point: ``lm-eval run --model sparse-balance ...``.
"""

import logging
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from safetensors import SafetensorError

from sparsebalance_megatron.attention.select import Selector, selector_named
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.evaluate import NAME, SparseAttention, configure, settings_of
from sparsebalance_megatron.evaluate.attention import asks_with_earlier_queries

_LENGTHS_TOKENS = tuple(2**power for power in range(10, 18))
_logger = logging.getLogger(f"lm_eval.{__name__}")
"""One of the harness's: it prints no others."""


@register_model("sparse-balance")
class SparseBalanceLM(HFLM):
    """A Hugging Face model that reads with the attention it was trained with.

    Its log and its results name the settings, up to which length documents are read whole, and the
    share of causal attention that is computed. Requests to generate run one by one: rows
    of unequal length would need padding on the left, which would move blocks. Loglikelihoods run in
    batches.

    Args:
        pretrained: a directory or name, as for the ``hf`` model; or a model.
        sparse: False reads with dense attention, for comparison.
        arguments: those of the ``hf`` model; and fields of
            :class:`sparsebalance_megatron.evaluate.SparseAttention`, which replace the settings
            in the model's config.json.

    Raises:
        ConfigError: the model has no settings and none are given, or one is wrong, or its weights
            are damaged.
    """

    batch_size_per_gpu: int | str

    def __init__(self, pretrained: Any, *, sparse: bool = True, **arguments: Any) -> None:
        fields = SparseAttention.__struct_fields__
        settings = {name: arguments.pop(name) for name in fields if name in arguments}
        if settings and not sparse:
            raise ConfigError(
                f"sparse-balance: sparse=False reads everything; drop {', '.join(settings)}"
            )
        try:
            super().__init__(pretrained, **arguments)
        except SafetensorError as error:
            raise ConfigError(
                f"{pretrained}: a safetensors file is damaged ({error}); copy it again"
            ) from error
        self._sparse = sparse
        if sparse:
            configure(self.model, **settings)
            self.model.set_attn_implementation(NAME)
            _logger.info("sparse-balance: %s", self._attention())

    def generate_until(self, *arguments: Any, **keywords: Any) -> list[str]:
        batch_size, self.batch_size_per_gpu = self.batch_size_per_gpu, 1
        no_cache = self._sparse and asks_with_earlier_queries(self._selector)
        if no_cache:
            # The harness asks for a cache, whatever its arguments say.
            generate = type(self.model).generate
            self.model.generate = lambda **given: generate(
                self.model, **given | {"use_cache": False}
            )
        try:
            answers: list[str] = super().generate_until(*arguments, **keywords)
        finally:
            self.batch_size_per_gpu = batch_size
            if no_cache:
                del self.model.generate
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model for the results: also its attention."""
        info: dict[str, Any] = super().get_model_info()
        return info | (self._attention() if self._sparse else {"attention": "dense"})

    @property
    def _selector(self) -> Selector[Any, Any]:
        return selector_named(settings_of(self.model.config).sparse_selection)

    def _attention(self) -> dict[str, Any]:
        config = self.model.config.get_text_config()
        settings, layers = settings_of(config), config.num_hidden_layers
        return {
            "attention": NAME,
            **settings.as_config(),
            "whole_up_to_tokens": settings.whole_up_to_tokens(layers),
            "density_by_tokens": {
                str(tokens): round(settings.density(tokens, layers), 4)
                for tokens in _LENGTHS_TOKENS
            },
        }
