# SPDX-License-Identifier: Apache-2.0
"""The plugin's core attention with what an experiment adds. Imports Megatron.

Dense where the arm is; can be probed.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from end_to_end.attention import PeerAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

READS_ALL = -2
"""Step of a micro-batch that is evaluated with dense attention; sparse evaluation has -1."""

Probe = Callable[[int, Tensor, Tensor, AttentionOptions, LocalMicroBatch, float], None]
"""Called with a layer's index, q_THD, k_TGD, the layer's options, the micro-batch's context and the
softmax scale."""


@dataclass(kw_only=True)
class Experiment:
    """What the layers of a model share with who runs it.

    Attributes:
        is_dense: whether a training step reads everything.
        probe: called in every forward, where it is set.
    """

    is_dense: Callable[[int], bool]
    probe: Probe | None = None

    def reads_all(self, step: int) -> bool:
        return step == READS_ALL or (step >= 0 and self.is_dense(step))


class ArmAttention(PeerAttention):
    """Core attention of an arm."""

    def __init__(
        self, *arguments: Any, options: AttentionOptions, experiment: Experiment, **keywords: Any
    ) -> None:
        super().__init__(*arguments, options=options, is_dense=experiment.reads_all, **keywords)
        self._experiment = experiment

    def forward(
        self, query: Tensor, key: Tensor, *arguments: Any, packed_seq_params: Any, **keywords: Any
    ) -> Tensor:
        """As the parent."""
        if self._experiment.probe is not None:
            self._experiment.probe(
                self._layer_index,
                query,
                key,
                self._options,
                packed_seq_params.micro_batch,
                self._softmax_scale,
            )
        return super().forward(
            query, key, *arguments, packed_seq_params=packed_seq_params, **keywords
        )


def arm_layer_spec(
    options: AttentionOptions, experiment: Experiment
) -> Callable[[Any, int | None], Any]:
    """The plugin's spec function with :class:`ArmAttention` in every layer."""
    plugin_spec = sparse_balance_layer_spec(options)

    def spec(transformer_config: Any, vp_stage: int | None = None) -> Any:
        layers = plugin_spec(transformer_config, vp_stage)
        for layer in getattr(layers, "layer_specs", None) or [layers]:
            layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
                module=ArmAttention, params={"options": options, "experiment": experiment}
            )
        return layers

    return spec
