# SPDX-License-Identifier: Apache-2.0
"""Qwen3 and Qwen3-MoE from weights of Hugging Face through sparse training and back to scores.

The first loss of training is held to `transformers` in float64 with an oracle's attention, the
weights that come back to the ones that came in, and the loss of the exported model, read by the
registered attention, to that of training.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from convert.conversions import (
    Conversions,
    assert_came_back,
    read_documents,
    reference_loss,
    succeeded,
)
from convert.tiny_models import save, stored_tensors, tiny_model
from harness import CHANGED, TrainingRun
from oracles.attention import moba_lists, plain_attention, token_mask
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from sparsebalance_megatron import evaluate

pytestmark = pytest.mark.distributed

BLOCK, BUDGET, SELECTION = 16, 3, "token-kv-head"
EXPERTS, MIXED, DENSE = "qwen3_moe-shares", "qwen3_moe-mixed", "qwen3-tied"
LAYOUTS = {
    "experts together": (EXPERTS, ""),
    "experts apart": (EXPERTS, "--expert-model-parallel-size 2"),
    "experts and tensors": (
        MIXED,
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --sequence-parallel --sparse-balance-device cpu",
    ),
    "stages": (DENSE, "--pipeline-model-parallel-size 2"),
}
"""Run on two ranks -> model and layout. Runs of EXPERTS learn; the others change nothing."""
ENTRY_POINTS = (
    ("-m", "sparsebalance_megatron.pretrain_gpt"),
    (CHANGED, "marked-norms"),
)
"""Without and with sequence parallelism, which experts need where tensors are split."""
ROUNDINGS = 16 * 2.0**-23


def oracle_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one document by the lists of the oracle, with a mask over all tokens."""
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    boundaries = [0, len(q_THD)]
    lists = moba_lists(q_THD, k_TGD, boundaries, BLOCK, [BUDGET], SELECTION)
    heads = (q_THD.shape[1], k_TGD.shape[1])
    mask_HTT = token_mask(lists, *heads, boundaries, BLOCK, SELECTION)
    return plain_attention(q_THD, k_TGD, v_TGD, mask_HTT, scaling)[0][None], None


AttentionInterface.register("oracle", oracle_attention)


class Work(Conversions):
    """Everything that ran, and where it left its files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tokens = read_documents(self.documents)
        save(tiny_model(EXPERTS), self.hf(EXPERTS), max_shard_size="40KB")
        save(tiny_model(MIXED), self.hf(MIXED), save_original_format=False)
        save(tiny_model(DENSE), self.hf(DENSE))
        convert = ("convert", "from-hf")
        self.before = self.run(
            "before",
            {
                each: (*convert, str(self.hf(each)), "--output", str(self.checkpoint(each)))
                for each in (EXPERTS, MIXED, DENSE)
            },
        )
        self.runs = {name: self._train(name) for name in LAYOUTS}
        self.after = self.run(
            "after",
            {
                name: self.export(
                    name, variant, *(("--iteration", "2") if variant == EXPERTS else ())
                )
                for name, (variant, _) in LAYOUTS.items()
            },
        )

    def _train(self, name: str) -> TrainingRun:
        variant, layout = LAYOUTS[name]
        steps = "--train-iters 1 --lr 1e-30 --save-interval 1"
        if variant == EXPERTS:
            steps = "--train-iters 3 --save-interval 2"
        own = f"--sparse-balance-base-budget {BUDGET} --sparse-balance-selection {SELECTION}"
        program = ENTRY_POINTS["--sequence-parallel" in layout]
        flags = f"{steps} {own} {layout}".split()
        return self.train(name, variant, *flags, program=program)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_sparse_loss_is_that_of_the_oracle(name: str, work: Work) -> None:
    variant, _ = LAYOUTS[name]
    model = tiny_model(variant).double()
    dense = reference_loss(model, work.tokens)
    model.set_attn_implementation("oracle")
    expected = reference_loss(model, work.tokens)
    assert abs(expected - dense) > 10 * ROUNDINGS * expected
    assert work.runs[name].steps[0]["lm_loss"] == pytest.approx(expected, rel=ROUNDINGS)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0] != EXPERTS])
def test_weights_come_back_to_the_bit(name: str, work: Work) -> None:
    """From fused experts or a tied embedding, over two ranks, to tensors named as usual."""
    variant, _ = LAYOUTS[name]
    model = tiny_model(variant)
    tensors = len(stored_tensors(model))
    assert f": {tensors} tensors of Hugging Face, " in succeeded(work.before[variant])
    succeeded(work.after[name])
    assert_came_back(work.exported(name), model)


def test_experts_learn_the_same_together_and_apart(work: Work) -> None:
    together, apart = work.runs["experts together"], work.runs["experts apart"]
    losses = together.logged("lm_loss")
    assert len(losses) == 3 and losses[2] < losses[0]
    assert apart.logged("lm_loss") == pytest.approx(losses, rel=ROUNDINGS)
    norms = [[float(norm) for norm in run.grad_norms] for run in (together, apart)]
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


@pytest.mark.parametrize("name", ["experts together", "experts apart"])
def test_the_exported_model_scores_as_training_did(name: str, work: Work) -> None:
    """Weights of two steps, read with the attention that config.json says, have step 3's loss."""
    succeeded(work.after[name])
    model = AutoModelForCausalLM.from_pretrained(work.exported(name)).double()
    model.set_experts_implementation("eager")
    dense = reference_loss(model, work.tokens)
    model.set_attn_implementation(evaluate.NAME)
    assert evaluate.settings_of(model.config).sparse_topk_blocks == BUDGET
    sparse = reference_loss(model, work.tokens)
    assert work.runs[name].steps[2]["lm_loss"] == pytest.approx(sparse, rel=ROUNDINGS)
    evaluate.configure(model, sparse_topk_blocks=100)
    assert reference_loss(model, work.tokens) == pytest.approx(dense, rel=1e-12)
    assert abs(sparse - dense) > 10 * ROUNDINGS * sparse
