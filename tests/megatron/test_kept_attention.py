# SPDX-License-Identifier: Apache-2.0
"""Attention that recomputation takes from the first forward, through Megatron's own checkpoint."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from micro_batches import BLOCK, params_with
from torch import Tensor

from sparsebalance_megatron.attention.kernels import tokens as kernel
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.kept_attention import RecomputeError
from sparsebalance_megatron.megatron.packed_seq_params import BudgetedPackedSeqParams

HEADS, GROUPS, HEAD_DIM, LAYERS = 4, 2, 8, 3
WIDTH = HEADS * HEAD_DIM
LENGTHS = (70, 16, 45)

ONE_BY_ONE = "uniform, one layer at a time"
HOW = {
    ONE_BY_ONE: [(0, 1), (1, 2), (2, 3)],
    "uniform, three layers at a time": [(0, 3)],
    "block, the first layer": [(0, 1)],
    "selective": [],
}
"""Checkpointed layers, from and to."""


@pytest.fixture(autouse=True)
def random_states_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that Megatron's checkpoint asks of a GPU."""
    monkeypatch.setattr(megatron_random, "_get_all_rng_states", lambda: (torch.get_rng_state(),))
    monkeypatch.setattr(megatron_random, "_set_all_rng_states", torch.set_rng_state)
    # It stays set after an exception.
    monkeypatch.setattr(megatron_random, "IS_CHECKPOINTING", False)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one entry, its tokens, with every call of the forward of attention."""
    calls: list[int] = []
    original = kernel.forward

    def counted(q_THD: Tensor, *arguments: Any, **keywords: Any) -> Any:
        calls.append(q_THD.shape[0])
        return original(q_THD, *arguments, **keywords)

    monkeypatch.setattr(kernel, "forward", counted)
    yield calls


class Model(torch.nn.Module):
    """Three layers of attention between projections, checkpointed as Megatron would."""

    def __init__(self, how: str = ONE_BY_ONE, *, keep: bool = True) -> None:
        super().__init__()
        self.how = how
        generator = torch.Generator().manual_seed(5)
        wide = (HEADS + 2 * GROUPS) * HEAD_DIM
        self.into, self.out = (
            torch.nn.ParameterList(
                torch.randn(*shape, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)
            )
            for shape in ((WIDTH, wide), (WIDTH, WIDTH))
        )
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            use_cpu_initialization=True,
        )
        options = AttentionOptions(
            SparseBalanceConfig(
                block_size=BLOCK,
                base_budget=3,
                selection="token-kv-head",
                coverage_threshold=0.1,
                recompute_attention="keep" if keep else "again",
            ),
            (1, 2, 4),
        )
        self.attention = torch.nn.ModuleList(
            BudgetedCoreAttention(config, 1 + layer, AttnMaskType.causal, "self", options=options)
            for layer in range(LAYERS)
        )

    def layer(self, layer: int, x: Tensor, params: BudgetedPackedSeqParams) -> Tensor:
        heads = (x @ self.into[layer]).unflatten(1, (-1, HEAD_DIM))
        qkv = heads.split([HEADS, GROUPS, GROUPS], dim=1)

        def attend(*inputs: Tensor) -> Tensor:
            return self.attention[layer](*inputs, None, packed_seq_params=params)

        selective = self.how == "selective" and self.training
        out = checkpoint(attend, False, *qkv) if selective else attend(*qkv)
        return x + torch.nn.functional.dropout(out @ self.out[layer], 0.2, self.training)

    def forward(self, x: Tensor, params: BudgetedPackedSeqParams) -> Tensor:
        parts = HOW[self.how] if self.training else []
        parts = parts + [(n, n + 1) for n in range(max((end for _, end in parts), default=0), 3)]
        for begin, end in parts:

            def some(x: Tensor, begin: int = begin, end: int = end) -> Tensor:
                for layer in range(begin, end):
                    x = self.layer(layer, x, params)
                return x

            checkpointed = (begin, end) in HOW[self.how] and self.training
            x = checkpoint(some, False, x) if checkpointed else some(x)
        return x


def micro_batch(seed: int = 0) -> tuple[Tensor, BudgetedPackedSeqParams]:
    lengths = np.roll(LENGTHS, seed).tolist()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), WIDTH, generator=generator, requires_grad=True)
    return x, params_with(lengths, np.full((LAYERS, len(lengths)), 2, dtype=np.int32))


def trained(model: Model, steps: Callable[[Model], list[Tensor]]) -> list[Tensor]:
    torch.manual_seed(7)
    seen = steps(model)
    return [*seen, *(weight.grad for weight in model.parameters())]


def two_in_flight(model: Model, order: int = 1) -> list[Tensor]:
    """Forward, forward, backward, backward, in order as 1F1B does, or the other way round."""
    batches = [micro_batch(seed) for seed in (0, 1)]
    losses = [model(*batch).square().sum() for batch in batches]
    for loss in losses[::order]:
        loss.backward()
    assert [params.kept.layers for _, params in batches] == [(), ()]
    totals = sum(params.micro_batch.recompute.totals() for _, params in batches)
    return [*losses, *(x.grad for x, _ in batches), totals]


@pytest.mark.parametrize(("how", "order"), [*((how, 1) for how in HOW), (ONE_BY_ONE, -1)])
def test_kept_attention_changes_no_bit(how: str, order: int, forwards: list[int]) -> None:
    checkpointed = 3 if how == "selective" else sum(end - begin for begin, end in HOW[how])
    *ours, totals = _with_totals(Model(how), order)
    assert len(forwards) == 2 * LAYERS
    assert totals.tolist() == [2 * checkpointed, 0, 0]
    forwards.clear()
    *expected, totals = _with_totals(Model(how, keep=False), order)
    assert len(forwards) == 2 * (LAYERS + checkpointed)
    assert totals.tolist() == [0, 0, 0]
    assert len(ours) == 4 + 2 * LAYERS
    assert all(map(torch.equal, ours, expected))


def _with_totals(model: Model, order: int) -> list[Tensor]:
    """Losses and gradients, then the totals."""
    found = trained(model, partial(two_in_flight, order=order))
    return [*found[:4], *found[5:], found[4]]


def test_evaluation_keeps_nothing() -> None:
    model = Model().eval()
    x, params = micro_batch()
    with torch.no_grad():
        model(x, params)
    assert params.kept.layers == ()
    model(x, params).sum().backward()
    assert params.kept.layers == ()
    assert params.micro_batch.recompute.again == 0


def test_what_no_backward_takes_goes_with_the_micro_batch() -> None:
    """As after an exception, or under Megatron's re-run machinery; the context may live on."""
    model, (x, params) = Model(), micro_batch()
    out = model(x, params)
    context, kept = params.micro_batch, weakref.ref(params.kept)
    assert params.kept.layers == (0, 1, 2)
    del out, params
    gc.collect()
    assert kept() is None
    assert context.observations.keys() == {0, 1, 2}


@pytest.mark.parametrize("backward_of", [0, 1])
def test_a_layer_that_ran_twice_attends_again(backward_of: int, forwards: list[int]) -> None:
    """Which of the two passes a backward means cannot be told."""

    def twice(model: Model) -> list[Tensor]:
        x, params = micro_batch()
        outs = [model(x * scale, params) for scale in (1.0, 2.0)]
        outs[backward_of].square().sum().backward()
        if model.attention[0]._options.config.recompute_attention == "keep":
            assert params.micro_batch.recompute.totals().tolist() == [0, LAYERS, 0]
        return [x.grad]

    ours, expected = (trained(Model(keep=keep), twice) for keep in (True, False))
    assert len(forwards) == 2 * 3 * LAYERS
    assert all(map(torch.equal, ours, expected))


def test_a_second_backward_attends_again() -> None:
    """The first one let go of what was kept."""
    model, (x, params) = Model("selective"), micro_batch()
    loss = model(x, params).square().sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, first)
    assert params.micro_batch.recompute.totals().tolist() == [LAYERS, LAYERS, 0]


@pytest.mark.parametrize(
    ("factor", "broken", "otherwise"), [(1.0 + 2.0**-20, False, 1), (1.0, True, 0)]
)
def test_other_inputs_in_the_recomputed_pass_are_counted(
    factor: float, broken: bool, otherwise: int
) -> None:
    """One NaN is as good as another."""
    model, (x, params) = Model(), micro_batch()
    with torch.no_grad():
        if broken:
            x[0] = torch.nan
    loss = model(x, params).square().sum()
    with torch.no_grad():
        model.into[1].mul_(factor)
    loss.backward()
    assert params.micro_batch.recompute.totals().tolist() == [LAYERS, 0, otherwise]


def test_results_that_cannot_be_right_are_refused() -> None:
    model, (x, params) = Model(), micro_batch()
    loss = model(x, params).sum()
    params.kept._by_layer[2].out_THF.mul_(2.0)
    with pytest.raises(RecomputeError, match=r"layer 3: .* written to in place"):
        loss.backward()


def test_a_pass_of_another_row_is_refused() -> None:
    model, (x, params) = Model("selective"), micro_batch()
    out = model(x, params)
    with pytest.raises(RecomputeError, match=r"layer 1: .*\(130, 4, 8\).* after \(131, 4, 8\)"):
        params.kept.take(
            0, tuple(torch.zeros(130, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS))
        )
    assert out.requires_grad


def test_selective_recomputation_shares_the_output_with_the_projection() -> None:
    """So that keeping it costs the log-sum-exp and the lists alone."""
    model, (x, params) = Model("selective"), micro_batch()
    taken: list[int] = []

    def saved(tensor: Tensor) -> Tensor:
        taken.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        model(x, params)
    outputs = {params.kept._by_layer[n].out_THF.untyped_storage().data_ptr() for n in range(LAYERS)}
    assert outputs <= set(taken)
