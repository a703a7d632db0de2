# SPDX-License-Identifier: Apache-2.0
"""Core attention as Megatron calls it: layouts, budgets, observation."""

import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from micro_batches import BLOCK, params_with
from torch import Tensor

from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    BudgetedCoreAttention,
    TruePositions,
    replace_core_attention,
)
from sparsebalance_megatron.megatron.own_attention import SharesHeads
from sparsebalance_megatron.megatron.packed_seq_params import (
    BASE,
    EXECUTED,
    STEPS_PER_FULL_OBSERVATION,
    BudgetedPackedSeqParams,
    LayoutCache,
)
from sparsebalance_megatron.megatron.unsupported import check_model

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = (100, 16, 230)


def attention(
    *,
    base_budget: int = 3,
    layer: int = 1,
    layer_budgets: str | None = None,
    dense_up_to: str = "0",
    implementation: str = "auto",
    own: Any = None,
    softmax_type: str = "vanilla",
    **choices: Any,
):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        use_cpu_initialization=True,
        softmax_type=softmax_type,
    )
    options = AttentionOptions(
        SparseBalanceConfig(
            block_size=BLOCK,
            base_budget=base_budget,
            layer_budgets=layer_budgets,
            dense_up_to=dense_up_to,
            attention=implementation,
            selection="previous-block",
            **choices,
        ),
        (1, 2, 4, 8, 15),
    )
    return BudgetedCoreAttention(
        *(config, layer, AttnMaskType.causal, "self"), options=options, own=own
    )


def packed_qkv(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HEADS, HEAD_DIM), *((tokens, KV_HEADS, HEAD_DIM),) * 2)
    return tuple(2.0 * torch.randn(shape, generator=generator) for shape in shapes)


def params_of(budgets_LS: np.ndarray | int, **how: Any) -> BudgetedPackedSeqParams:
    """Budgets of two layers, or one for all."""
    return params_with(LENGTHS, np.broadcast_to(np.int32(budgets_LS), (2, len(LENGTHS))), **how)


def dense(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, boundaries
) -> torch.Tensor:
    parts = []
    for start, end in itertools.pairwise(boundaries):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1).reshape(end - start, -1))
    return torch.cat(parts)


def assert_dense(out: torch.Tensor, qkv: tuple[torch.Tensor, ...], boundaries) -> None:
    """To rounding, by what attention of torch in float32 is off."""
    exact = dense(*(x.double() for x in qkv), boundaries)
    plain_error = (dense(*qkv, boundaries) - exact).abs().max()
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (out - exact).abs().max() <= 2 * plain_error + 4 * rounding


def lists_of(layer: BudgetedCoreAttention) -> list[Any]:
    """Grows by what the layer selects."""
    lists, select = [], layer.select
    layer.select = lambda *given: lists.append(select(*given)) or lists[-1]
    return lists


def test_each_layer_executes_its_own_planned_budgets() -> None:
    """Far below, and above, the base budget; coverage is that of the lists that were made."""
    q_THD, k_TGD, v_TGD = packed_qkv(sum(LENGTHS))
    budgets_LS = np.array([[3, 3, 3], [1, 2, 9]])
    params = params_of(budgets_LS)
    for layer, budgets_S in enumerate(budgets_LS.tolist()):
        module = attention(layer=layer + 1)
        lists = lists_of(module)
        module(q_THD, k_TGD, v_TGD, None, packed_seq_params=params)
        layout = params.micro_batch.layout
        most_S = [
            int(counts_QC.max())
            for counts_QC in lists[0].counts_QC.split(list(layout.blocks_per_document))
        ]
        fitting_S = [min(*of) for of in zip(budgets_S, layout.blocks_per_document, strict=True)]
        assert most_S == fitting_S
        seen = params.micro_batch.observations[layer]
        curves_SK = _curves(q_THD, k_TGD, params)
        columns_S = torch.tensor(fitting_S)[:, None] - 1
        torch.testing.assert_close(seen[:, EXECUTED], curves_SK.gather(1, columns_S)[:, 0])
        torch.testing.assert_close(seen[:, :BASE], curves_SK[:, [0, 1, 3, 7, 14]])
    torch.testing.assert_close(seen[:, BASE], params.micro_batch.observations[0][:, EXECUTED])
    assert (seen[:, EXECUTED] < seen[:, BASE]).tolist() == [True, False, False]


def test_layers_have_base_budgets_of_their_own() -> None:
    """Coverage is compared with a layer's own; a dense layer reads everything and ranks nothing."""
    qkv = packed_qkv(sum(LENGTHS))

    def both_layers(
        text: str, dense: Sequence[int] = ()
    ) -> tuple[list[torch.Tensor], dict[int, Tensor]]:
        params = params_with(LENGTHS, np.ones((2, 3), dtype=np.int32), dense=dense)
        layers = [attention(layer=layer, layer_budgets=text) for layer in (1, 2)]
        outputs = [layer(*qkv, None, packed_seq_params=params) for layer in layers]
        return outputs, params.micro_batch.observations

    _, seen = both_layers("1:0")
    torch.testing.assert_close(seen[0][:, BASE], seen[0][:, EXECUTED])
    assert (seen[1][:, BASE] > seen[1][:, EXECUTED]).tolist() == [True, False, True]
    outputs, seen = both_layers("dense:0-1", (3, 3))
    for layer, out in enumerate(outputs):
        assert_dense(out, qkv, (0, *np.cumsum(LENGTHS).tolist()))
        assert (seen[layer] == 1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_numbers_of_a_document_reach_no_other(value: float) -> None:
    """Invariant 11: output, gradients, coverage and budgets keep every bit."""
    clean = list(packed_qkv(sum(LENGTHS)))
    broken = [x.clone() for x in clean]
    bad = LENGTHS[0] + LENGTHS[1] + 99
    for x in broken:
        x[bad, 0, 0] = value

    def run(qkv: list[torch.Tensor]) -> tuple[list[torch.Tensor], Tensor]:
        leaves = [x.clone().requires_grad_() for x in qkv]
        params = params_of(1)
        out = attention()(*leaves, None, packed_seq_params=params)
        out.sum().backward()
        results = [out.detach(), *(leaf.grad for leaf in leaves)]
        return results, params.micro_batch.observations[0]

    (ours, seen), (expected, expected_seen) = run(broken), run(clean)
    others = sum(LENGTHS[:2])
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(x[:others], y[:others])
    assert torch.equal(seen[:2], expected_seen[:2])
    assert seen[2].isnan().all()


def _curves(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, params: BudgetedPackedSeqParams
) -> torch.Tensor:
    """[S, K] coverage of the selector, by itself."""
    selector = selector_named("previous-block")
    ranking = rank_sequence(
        selector,
        *(q_THD, k_TGD, params.micro_batch.layout),
        softmax_scale=HEAD_DIM**-0.5,
        max_budget=1,
        observe=True,
    )
    return selector.coverage(ranking)


def test_padding_for_sequence_parallelism_is_one_more_sequence() -> None:
    tokens = sum(LENGTHS)
    qkv = packed_qkv(tokens + 6)
    padded = attention()(*qkv, None, packed_seq_params=params_of(3, padding=6))
    plain = attention()(*(x[:tokens] for x in qkv), None, packed_seq_params=params_of(3))
    torch.testing.assert_close(padded[:tokens], plain)


@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_without_a_carrier_every_sample_gets_the_base_budget(layout: str) -> None:
    batch, sequence = 2, 60
    boundaries = (0, sequence, 2 * sequence)
    qkv = packed_qkv(batch * sequence)
    module = attention(base_budget=100)
    if layout == "thd":
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
        out = module(*qkv, None, packed_seq_params=params)
    else:
        rows = [x.view(batch, sequence, *x.shape[1:]).transpose(0, 1) for x in qkv]
        out_sbh = module(*rows, None)
        assert out_sbh.shape == (sequence, batch, HEADS * HEAD_DIM)
        out = out_sbh.transpose(0, 1).reshape(batch * sequence, -1)
    assert_dense(out, qkv, boundaries)


def test_masks_and_biases_that_are_not_causal_attention_are_refused() -> None:
    qkv = packed_qkv(32)
    rows = [x[:, None] for x in qkv]
    with pytest.raises(ConfigError, match="not causal"):
        attention()(*rows, None, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ConfigError, match="bias"):
        attention()(*rows, None, attention_bias=torch.zeros(1))


COVERED_FIRST = (2 * BLOCK, 3 * BLOCK - 5, 7 * BLOCK + 3)


def _output_and_gradients(
    params: BudgetedPackedSeqParams, **how: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    leaves = [x.clone().requires_grad_() for x in packed_qkv(sum(COVERED_FIRST))]
    layer = attention(**how)
    lists = lists_of(layer)
    out = layer(*leaves, None, packed_seq_params=params)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)], lists


@pytest.mark.parametrize("step", [STEPS_PER_FULL_OBSERVATION, STEPS_PER_FULL_OBSERVATION + 1])
def test_dense_documents_need_no_lists(step: int) -> None:
    """Base budget 3: results are those of lists to rounding, and other documents' lists are equal;
    every few steps dense documents are routed, too, for their curves."""
    budgets_LS = np.array([[3, 3, 3], [3, 3, 3]], dtype=np.int32)
    some, listed = (
        params_with(COVERED_FIRST, budgets_LS, step=step, dense=(2, 2)) for _ in range(2)
    )
    ours, (of_others,) = _output_and_gradients(some)
    expected, (of_all,) = _output_and_gradients(listed, implementation="reference")
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max()), rtol=1e-5)
    first = of_all.query_layout.grid.first_block_S[2]
    assert of_others.counts_QC.equal(of_all.counts_QC[first:])
    inside = torch.arange(of_others.indices_QCK.shape[2]) < of_others.counts_QC[..., None]
    numbers = of_others.indices_QCK + first
    assert numbers[inside].equal(of_all.indices_QCK[first:][inside].to(numbers.dtype))
    seen, all_seen = (x.micro_batch.observations[0] for x in (some, listed))
    if step == STEPS_PER_FULL_OBSERVATION:
        torch.testing.assert_close(seen, all_seen)
    else:
        assert seen[:2, :BASE].isnan().all()
        torch.testing.assert_close(seen[2], all_seen[2])
    assert (seen[:2, BASE:] == 1.0).all()
    raised = params_with(COVERED_FIRST, np.full((2, 3), 8, dtype=np.int32), step=step, dense=(3, 3))
    _output_and_gradients(raised)
    base_S = raised.micro_batch.observations[0][:, BASE]
    expected_S = all_seen[:, BASE].clone()
    if step != STEPS_PER_FULL_OBSERVATION:
        expected_S[2] = torch.nan
    torch.testing.assert_close(base_S, expected_S, equal_nan=True)


@pytest.mark.parametrize("carried", [True, False])
def test_documents_up_to_a_length_are_dense_as_if_the_base_budget_covered_them(
    carried: bool,
) -> None:
    """The last document has 8 blocks; without a carrier budgets are base budgets."""
    found = []
    for base_budget, dense_up_to, budgets in ((2, 3 * BLOCK, (2, 3, 2)), (3, 0, (2, 3, 2))):
        params = params_with(COVERED_FIRST, np.array([budgets], dtype=np.int32), dense=(2,))
        if not carried:
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=params.cu_seqlens_q)
        how = {"base_budget": base_budget, "dense_up_to": str(dense_up_to)}
        found.append(_output_and_gradients(params, **how))
    (ours, (lists,)), (expected, (others,)) = found
    first = sum(COVERED_FIRST[:2])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a[:first], b[:first], atol=0.0, rtol=0.0)
    assert lists.query_layout.documents == others.query_layout.documents == 1


EXACT = {"layer_budgets": "dense:all", "tuning": "off"}


def _spec_with(core_attention: Any) -> Any:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    return spec


@pytest.mark.parametrize(
    ("leaves", "core_attention", "kept"),
    [
        pytest.param(True, MegatronModule, True, id="takes-packed-sequences"),
        pytest.param(True, ModuleSpec(module=MegatronModule), True, id="a-spec"),
        pytest.param(True, DotProductAttention, False, id="takes-none"),
        pytest.param(False, MegatronModule, False, id="sparse-shared-or-cut"),
    ],
)
def test_exact_attention_is_the_models_own_where_it_takes_packed_sequences(
    leaves: bool, core_attention: Any, kept: bool
) -> None:
    options = AttentionOptions(SparseBalanceConfig(**EXACT), (1,), leaves_attention=leaves)
    given = _spec_with(core_attention)
    found = replace_core_attention(given, options).submodules.self_attention.submodules
    if kept:
        assert found.core_attention is core_attention or (
            found.core_attention.module is core_attention.module
        )
    else:
        assert found.core_attention.module is BudgetedCoreAttention


@pytest.mark.parametrize("leaves", [False, True])
def test_layers_with_one_spec_in_common_are_changed_once(leaves: bool) -> None:
    """As Megatron's layers with experts. Where ranks share sequences, multi-latent attention
    rotates by true positions, whatever attends."""
    one = get_gpt_layer_local_spec(multi_latent_attention=True)
    one.submodules.self_attention.submodules.core_attention = MegatronModule
    block = TransformerBlockSubmodules(layer_specs=[one, one])
    config = SparseBalanceConfig(**EXACT)
    options = AttentionOptions(config, (1,), leaves_attention=leaves, shares=True)
    first, second = replace_core_attention(block, options).layer_specs
    module = first.submodules.self_attention.module
    core_attention = first.submodules.self_attention.submodules.core_attention
    assert second is first and module.__mro__.count(TruePositions) == 1
    if leaves:
        assert core_attention.__mro__[1:3] == (SharesHeads, MegatronModule)
    else:
        assert core_attention.module is BudgetedCoreAttention


@pytest.mark.parametrize(
    ("choices", "cp_size", "leaves"),
    [
        ({}, 1, True),
        ({}, 2, True),
        ({"max_context_parallel": 2}, 1, True),
        ({"max_segments": 4}, 1, False),
        ({"tuning": "raise"}, 1, False),
        ({"layer_budgets": "dense:0"}, 1, False),
    ],
)
def test_sliding_windows_and_their_like_are_refused_where_attention_is_replaced(
    choices: dict[str, Any], cp_size: int, leaves: bool
) -> None:
    config = SparseBalanceConfig(**EXACT | choices)
    assert config.leaves_attention == leaves
    model = {"calculate_per_token_loss": True, "context_parallel_size": cp_size}
    engine = Namespace(**model, window_size=(128, 0), transformer_impl="transformer_engine")
    local = Namespace(**vars(engine) | {"transformer_impl": "local"})
    for given in (engine, local):
        if leaves and given is engine:
            check_model(given, config)
        else:
            with pytest.raises(ConfigError, match="--window-size 128 0"):
                check_model(given, config)


def test_a_model_whose_own_attention_takes_no_packed_sequences_has_no_windows() -> None:
    """A host's own layers say only when they are built what attention they have."""
    options = AttentionOptions(SparseBalanceConfig(**EXACT), (1,), leaves_attention=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        window_size=(128, 0),
    )
    with pytest.raises(ConfigError, match="--window-size 128 0: the block selection replaces"):
        BudgetedCoreAttention(config, 1, AttnMaskType.causal, "self", options=options)


CPU = torch.device("cpu")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that were read from the host; once, though a mode of torch's may call it again."""
    seen: list[Tensor] = []
    read, within = Tensor.tolist, []

    def tolist(self: Tensor) -> object:
        if not within:
            seen.append(self)
        within.append(self)
        try:
            return read(self)
        finally:
            within.pop()

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return seen


@pytest.mark.parametrize(("inference", "expected_reads"), [(False, 4), (True, 6)])
def test_a_tensor_is_read_once_until_it_may_have_changed(
    inference: bool, expected_reads: int, reads: list[Tensor]
) -> None:
    """Inference tensors do not count what is written to them, and are read each time."""
    with torch.inference_mode(inference):
        cache, cu_seqlens = LayoutCache(), torch.tensor([0, 20, 50])
        assert [cache.boundaries_of(cu_seqlens) for _ in range(3)] == [(0, 20, 50)] * 3
        cu_seqlens[1] = 30
        assert cache.boundaries_of(cu_seqlens) == (0, 30, 50)
        assert cache.boundaries_of(torch.tensor([0, 9])) == (0, 9)
        assert cache.boundaries_of(cu_seqlens) == (0, 30, 50)
    assert len(reads) == expected_reads


def test_layers_of_a_micro_batch_share_a_layout() -> None:
    cache = LayoutCache()
    layout = cache.layout((0, 20, 50), 16, CPU)
    assert cache.layout((0, 20, 50), 16, CPU) is layout
    assert cache.layout((0, 50), 16, CPU).cu_seqlens == (0, 50)
    assert cache.layout((0, 50), 32, CPU).block_size == 32


class OwnAttention(MegatronModule):
    """Takes packed sequences, as Transformer Engine's does; every call's documents are kept."""

    calls: ClassVar[list[int]] = []

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, *qkv: Any, packed_seq_params: PackedSeqParams, **_: Any) -> Tensor:
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        self.calls.append(len(boundaries) - 1)
        return dense(*qkv[:3], boundaries)


@pytest.mark.parametrize(
    ("choices", "calls"),
    [
        ({}, [1]),
        ({"dense_attention": "model"}, [1]),
        ({"dense_attention": "torch"}, []),
        ({"implementation": "blocks"}, []),
    ],
)
def test_dense_documents_run_on_the_models_own_attention(
    choices: dict[str, Any], calls: list[int]
) -> None:
    """The first document is dense, the others have lists: outputs and gradients are the same."""
    results, OwnAttention.calls[:] = [], []
    plain = attention(dense_up_to="100")
    for layer in (plain, attention(dense_up_to="100", own=OwnAttention, **choices)):
        inputs = [x.requires_grad_() for x in packed_qkv(sum(LENGTHS))]
        out = layer(*inputs, None, packed_seq_params=params_of(3, dense=(1, 1)))
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert OwnAttention.calls == calls
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert layer.state_dict().keys() == plain.state_dict().keys()


def test_an_own_attention_that_does_not_serve_is_refused_by_name() -> None:
    for given in ({}, {"own": OwnAttention, "softmax_type": "learnable"}):
        with pytest.raises(ConfigError, match="dense-attention=model"):
            attention(dense_attention="model", **given)
