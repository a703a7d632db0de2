# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags of a model, as words and as text to source; what else may train its weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from convert.tiny_models import tiny_config
from harness import PROGRAMS, run_program
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.megatron_model import (
    bash_array,
    default_divisor,
    model_flags,
    padded_rows,
    words,
)


def flags_of(variant: str, directory: Path, **changes) -> dict[str, tuple[str, ...]]:
    tiny_config(variant, **changes).save_pretrained(directory)
    flags = model_flags(read_config(directory), divisor=128, padded_vocab_size=256)
    named = {name: values for name, *values in flags}
    assert len(named) == len(flags)
    return {name: tuple(values) for name, values in named.items()}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("llama-llama3", {"--use-rope-scaling": (), "--rope-scaling-factor": ("32.0",)}),
        ("llama-linear", {"--rotary-seq-len-interpolation-factor": ("4",)}),
        (
            "qwen2-yarn",
            {
                "--position-embedding-type": ("yarn",),
                "--rotary-scaling-factor": ("4.0",),
                "--yarn-original-max-position-embeddings": ("128",),
                "--yarn-beta-fast": ("32.0",),
                "--yarn-beta-slow": ("1.0",),
                "--mscale": ("1.0",),
                "--mscale-all-dim": ("0.0",),
            },
        ),
        ("mistral-wide-heads", {"--kv-channels": ("24",)}),
        (
            "qwen3_moe-shares",
            {
                "--qk-layernorm": (),
                "--num-experts": ("4",),
                "--moe-ffn-hidden-size": ("40",),
                "--moe-router-topk": ("2",),
            },
        ),
        (
            "qwen3_moe-mixed",
            {"--moe-layer-freq": ("[0,1,0]",), "--moe-router-pre-softmax": ()},
        ),
    ],
)
def test_what_else_a_model_needs(
    variant: str, expected: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    flags = flags_of(variant, tmp_path)
    assert {name: flags[name] for name in expected} == expected
    assert flags["--untie-embeddings-and-output-weights"] == ()
    assert ("--add-qkv-bias" in flags) == variant.startswith("qwen2")
    assert ("--qk-layernorm" in flags) == variant.startswith("qwen3")
    assert ("--moe-router-pre-softmax" in flags) == (variant == "qwen3_moe-mixed")


@given(vocab_size=st.integers(1, 300_000), divisor=st.integers(1, 1024))
def test_padding_is_the_least_multiple(vocab_size: int, divisor: int) -> None:
    rows = padded_rows(vocab_size, divisor)
    assert rows % divisor == 0 and 0 <= rows - vocab_size < divisor


@given(vocab_size=st.integers(1, 300_000))
def test_the_default_pads_nothing(vocab_size: int) -> None:
    divisor = default_divisor(vocab_size)
    assert padded_rows(vocab_size, divisor) == vocab_size
    assert 128 % divisor == 0 and (vocab_size % (2 * divisor) or divisor == 128)


@pytest.mark.parametrize("variant", ["qwen2-yarn", "qwen3_moe-mixed"])
def test_bash_reads_the_array_as_the_same_words(variant: str, tmp_path: Path) -> None:
    """Where a file has a name that the words would match, were they patterns."""
    tiny_config(variant).save_pretrained(tmp_path)
    (tmp_path / "0").touch()
    flags = model_flags(read_config(tmp_path), divisor=2, padded_vocab_size=250)
    (tmp_path / "model_args.sh").write_text(bash_array("MODEL_ARGS", flags))
    script = 'source "$1" && printf "%s\\n" "${MODEL_ARGS[@]}"'
    result = subprocess.run(
        ["bash", "-c", script, "bash", str(tmp_path / "model_args.sh")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert tuple(result.stdout.split()) == words(flags)


OTHER_MODELS = (
    *({"rotary_base": 500}, {"position_embedding_type": "none"}, {"rotary_percent": 0.5}),
    *({"use_rope_scaling": True}, {"rotary_seq_len_interpolation_factor": 2}),
    *({"swiglu": False}, {"swiglu": False, "squared_relu": True}),
    *({"swiglu": False, "quick_geglu": True}, {"moe_router_load_balancing_type": "sinkhorn"}),
    *({"num_experts": None}, {"spec": ["local"]}, {"heterogeneous_layers_config_path": "x"}),
)
"""Arguments that are no fields of Megatron's configuration, or need a value of their own."""
SAME_MODEL = (
    {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
    {"norm_epsilon": 3},
)
OF_A_GPU = {
    *("apply_rope_fusion", "batch_invariant_mode", "cuda_graph_impl", "cuda_graph_modules"),
    *("enable_cuda_graph", "fine_grained_activation_offloading", "fp32_residual_connection"),
    *("fp8", "fp8_output_proj", "inference_cuda_graph_scope", "moe_enable_deepep"),
    *("inference_disable_triton_nvls_kernels", "inference_fuse_tp_communication"),
    *("moe_paged_stash", "moe_permute_fusion", "moe_router_fusion", "moe_router_padding_for_fp8"),
    *("moe_router_padding_for_quantization", "moe_single_grouped_bias", "symmetric_ar_type"),
    *("moe_single_grouped_weight", "moe_token_dispatcher_type", "test_mode"),
    *("pipeline_model_parallel_layout", "recompute_granularity", "use_te_activation_func"),
}
"""Arguments whose other values Megatron does not run in float64 on one CPU."""
SHAPES = {"moe_ffn_hidden_size", "moe_layer_freq", "num_query_groups"}


def test_every_argument_of_the_model_is_harmless_or_refused_by_name(tmp_path: Path) -> None:
    """Flipped one by one: logits equal to the bit, tensors that do not fit, or an error."""
    tiny_config("qwen3_moe-shares").save_pretrained(tmp_path)
    more = json.dumps(OTHER_MODELS + SAME_MODEL)
    program = (str(PROGRAMS / "flipped_settings.py"), str(tmp_path), more)
    process = run_program(program, tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert len(results) > 150
    for changes, result in results.items():
        (name, *_) = json.loads(changes)
        if json.loads(changes) in OTHER_MODELS:
            assert "refused" in result, changes
        elif "refused" in result:
            assert f"was trained with {name} " in result["refused"], changes
        elif name in SHAPES:
            assert "Error(s) in loading state_dict" in result["unbuildable"], changes
        elif "unbuildable" in result:
            assert name in OF_A_GPU, (changes, result)
        else:
            assert result["difference"] == 0, changes
    for name in ("no_rope_freq", "use_mup", "qk_l2_norm", "layernorm_epsilon", "softmax_type"):
        assert any("refused" in results[key] for key in results if f'"{name}"' in key), name
