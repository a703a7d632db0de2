# SPDX-License-Identifier: Apache-2.0
"""Attention that activation recomputation does not compute twice.

Megatron runs a checkpointed layer once without gradients, and again in backward. The first run's
output, log-sum-exp and lists stay with the micro-batch, and the second takes them instead of
routing and attending again, as in DISTFLASHATTN (arXiv:2310.03294, section 3.3: a checkpoint at
attention's output). Queries, keys and values are computed again; backward needs them.

Shape legend: T tokens of this rank's slice of the sequence.
"""

from dataclasses import dataclass, field

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection

_COMPARED_TOKENS = 8


class RecomputeError(RuntimeError):
    """A layer was recomputed with inputs that its first forward did not have."""


def in_first_pass() -> bool:
    """Whether Megatron runs a checkpointed function for the first time."""
    return bool(is_checkpointing()) and not torch.is_grad_enabled()


def in_recomputed_pass() -> bool:
    """Whether Megatron runs a checkpointed function again, in backward."""
    return bool(is_checkpointing()) and torch.is_grad_enabled()


@dataclass(kw_only=True)
class RecomputeCounts:
    """Recomputed passes of one micro-batch and model chunk.

    ``again``: layers that attended again although results were to be kept. ``changed``: of every
    layer that took what was kept, on the device, whether its inputs were other ones.
    """

    again: int = 0
    changed: list[Tensor] = field(default_factory=list)

    def totals(self) -> Tensor:
        """[3] float64: passes that took what was kept, that attended again, and that took it with
        other inputs; on the device of ``changed``."""
        if not self.changed:
            return torch.tensor([0, self.again, 0], dtype=torch.float64)
        changed = torch.stack(self.changed).sum().double()
        taken, again = (torch.full_like(changed, n) for n in (len(self.changed), self.again))
        return torch.stack([taken, again, changed])


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptResult:
    """Results of a first forward of one layer, with lists where there were any.

    ``version``: of out_THF, which must not be written to. ``samples``: the inputs at some tokens.
    """

    selection: Selection | None
    out_THF: Tensor
    lse_TH: Tensor
    version: int
    shapes: tuple[torch.Size, ...]
    samples: tuple[Tensor, ...]


@dataclass(eq=False)
class KeptAttention:
    """The results of one micro-batch in one model chunk, by layer, until backward takes them.

    Results of a layer that runs forward twice under the same parameters are let go: which of the
    two a backward means cannot be told, so it attends again, and that is counted in ``counts``.
    """

    counts: RecomputeCounts
    _by_layer: dict[int, KeptResult | None] = field(default_factory=dict, init=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose results are here."""
        return tuple(layer for layer, kept in self._by_layer.items() if kept is not None)

    def keep(
        self,
        layer: int,
        inputs: tuple[Tensor, ...],
        selection: Selection | None,
        result: tuple[Tensor, Tensor],
    ) -> None:
        """Keep the result (out_THF, lse_TH) of a layer's first forward on (q_THD, k_TGD, v_TGF)."""
        if layer in self._by_layer:
            self._by_layer[layer] = None
            return
        out_THF, lse_TH = result
        self._by_layer[layer] = KeptResult(
            selection=selection,
            out_THF=out_THF,
            lse_TH=lse_TH,
            version=out_THF._version,
            shapes=tuple(x.shape for x in inputs),
            samples=tuple(_some_tokens(x).clone() for x in inputs),
        )

    def take(self, layer: int, inputs: tuple[Tensor, ...]) -> KeptResult | None:
        """Give a layer's result to its recomputed pass and let go of it; None to attend again."""
        kept = self._by_layer.get(layer)
        if kept is None:
            self.counts.again += 1
            return None
        del self._by_layer[layer]
        shapes = tuple(x.shape for x in inputs)
        if shapes != kept.shapes or kept.out_THF._version != kept.version:
            found = "an attention output that was written to in place"
            if shapes != kept.shapes:
                now, before = (" ".join(map(str, map(tuple, x))) for x in (shapes, kept.shapes))
                found = f"query, key and value of shapes {now} after {before}"
            raise RecomputeError(
                f"layer {layer + 1}: the recomputed pass found {found}; if the model is not to "
                "blame, use --sparse-balance-config recompute-attention=again"
            )
        # NaN equals NaN.
        same = [
            torch.isclose(_some_tokens(x), sample, rtol=0.0, atol=0.0, equal_nan=True).all()
            for x, sample in zip(inputs, kept.samples, strict=True)
        ]
        self.counts.changed.append(~torch.stack(same).all())
        return kept


def _some_tokens(x_THD: Tensor) -> Tensor:
    """A few tokens from all over the sequence: enough to tell micro-batches or weights apart."""
    return x_THD.detach()[:: -(-x_THD.shape[0] // _COMPARED_TOKENS)]
