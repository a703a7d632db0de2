# SPDX-License-Identifier: Apache-2.0
"""Models of all kinds: with budgets that cover everything, losses and gradients of dense attention.

The yardstick is Megatron's own model in float64; :mod:`dense_models` measures how far Megatron's
and the plugin's float32 are from it.
"""

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_program

COMMON = (
    *("--num-layers", "3", "--hidden-size", "64", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--seq-length", "192"),
    *("--max-position-embeddings", "192", "--hidden-dropout", "0"),
    *("--attention-dropout", "0", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--mock-data"),
)
LLAMA = (
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--group-query-attention"),
    *("--num-query-groups", "2", "--position-embedding-type"),
)
# As many channels as values have, which Megatron's own attention takes for its output.
LATENT = (
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
    *("--multi-latent-attention", "--kv-lora-rank", "24", "--qk-head-dim", "24"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--kv-channels", "16"),
)
VARIANTS = {
    "rope": (*LLAMA, "rope"),
    "rope scaling": (*LLAMA, "rope", "--use-rope-scaling", "--rope-scaling-factor", "4"),
    "half rope, interleaved": (*LLAMA, "rope", "--rotary-percent", "0.5", "--rotary-interleaved"),
    "interpolated rope": (*LLAMA, "rope", "--rotary-seq-len-interpolation-factor", "4"),
    "layers without rope": (*LLAMA, "rope", "--no-rope-freq", "([0]*2+[1]*1)"),
    "yarn": (
        *(*LLAMA, "yarn", "--rotary-scaling-factor", "4"),
        *("--yarn-original-max-position-embeddings", "48"),
    ),
    "no positions": (*LLAMA, "none"),
    "gpt2": (),
    "query and key norm": ("--qk-layernorm", "--position-embedding-type", "rope"),
    "sinks of one": (*LLAMA, "rope", "--softmax-type", "off-by-one"),
    "learnt sinks": (*LLAMA, "rope", "--softmax-type", "learnable"),
    "latent attention": (*LATENT, "--rope-type", "rope"),
    "latent attention, compressed queries, yarn, learnt sinks": (
        *(*LATENT, "--qk-layernorm", "--q-lora-rank", "32", "--rope-type", "yarn"),
        *("--rotary-scaling-factor", "4", "--mscale", "0.7", "--mscale-all-dim", "0.7"),
        *("--softmax-type", "learnable"),
    ),
    "query-key layer scaling": ("--apply-query-key-layer-scaling",),
    "attention output gate": (*LLAMA, "rope", "--attention-output-gate"),
    "experts": (
        *(*LLAMA, "rope", "--num-experts", "4", "--moe-layer-freq", "([1]*1+[0]*1+[1]*1)"),
        *("--moe-ffn-hidden-size", "64", "--moe-token-dispatcher-type", "alltoall"),
        *("--moe-router-load-balancing-type", "none"),
    ),
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process builds all models."""
    variants = {name: (*COMMON, *flags) for name, flags in VARIANTS.items()}
    program = str(PROGRAMS / "dense_models.py")
    result = run_program((program, json.dumps(variants)), tmp_path_factory.mktemp("models"))
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("quantity", ["losses", "gradients"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_full_budgets_give_dense_attention(
    variant: str, quantity: str, errors: dict[str, Any]
) -> None:
    error = errors[variant]
    assert error["megatron"][quantity] > 0
    for how in ("plugin", "dense layers"):
        assert error[how][quantity] <= 2 * error["megatron"][quantity]
