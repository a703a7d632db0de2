# SPDX-License-Identifier: Apache-2.0
"""What config.json says and what is refused; Megatron's flags of a model, and what may train it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from convert.tiny_models import tiny_config
from harness import PROGRAMS, run_program
from transformers import AutoConfig

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.megatron_model import bash_array, model_flags, words
from sparsebalance_megatron.errors import ConvertError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The keys that have no default."""
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 128}
EXPERTS = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, LLAMA))
    assert (model.head_dim, model.rms_norm_eps) == (128, 1e-6)
    assert (model.rope_parameters.rope_type, model.rope_parameters.rope_theta) == ("default", 10000)
    assert (model.tie_word_embeddings, model.has_qkv_bias, model.weights_dtype) == (
        *(False, False),
        None,
    )
    without_groups = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    assert read_config(write(tmp_path, without_groups)).num_key_value_heads == 32
    with pytest.raises(ConvertError, match="num_key_value_heads"):
        read_config(write(tmp_path, without_groups | {"model_type": "qwen2"}))
    small = {"hidden_size": 2048, "head_dim": None}
    assert read_config(write(tmp_path, QWEN3 | small)).head_dim == 128
    assert read_config(write(tmp_path, EXPERTS | small)).head_dim == 64
    # A window that is switched off is none.
    off = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    assert read_config(write(tmp_path, QWEN2 | off)).model_type == "qwen2"
    assert read_config(write(tmp_path, MISTRAL)).model_type == "mistral"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": LLAMA3, "torch_dtype": "float16"},
        {"rope_parameters": DEFAULT_ROPE, "rope_scaling": None, "dtype": "bfloat16"},
        {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 1000000}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ],
)
def test_rope_is_read_in_every_spelling(rope: dict[str, Any], tmp_path: Path) -> None:
    """And `transformers` reads the same from each."""
    model = read_config(write(tmp_path, QWEN3 | rope))
    theirs = AutoConfig.from_pretrained(tmp_path)
    keys = ("rope_type", "rope_theta", "factor")
    read = tuple(theirs.rope_parameters.get(key) for key in keys)
    assert tuple(getattr(model.rope_parameters, key) for key in keys) == read
    assert read in {("linear", 1e6, 4.0), ("llama3", 1e6, 8.0), ("default", 1e6, None)}
    assert model.weights_dtype == theirs.dtype
    assert model.max_position_embeddings == theirs.max_position_embeddings


ADDED_SCALING = {
    "rope_parameters": DEFAULT_ROPE,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        *(QWEN3, ADDED_SCALING),
        "rope_scaling (linear, factor 4, rope_theta 10000) contradicts rope_parameters (default, "
        "rope_theta 1000000)",
    ),
    (EXPERTS, {"num_local_experts": 4}, "num_experts 8 contradicts num_local_experts 4"),
    (EXPERTS, {"num_experts": 0}, "missing required field num_experts"),
    (EXPERTS, {"num_experts_per_tok": 9}, "num_experts_per_tok 9: there are 8 experts"),
    (EXPERTS, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob True"),
    (EXPERTS, {"decoder_sparse_step": 33}, "decoder_sparse_step: no layer has experts"),
    (EXPERTS, {"num_experts": 2**18}, "num_hidden_layers 32: 8388608 experts, more than 262144"),
    (EXPERTS, {"mlp_only_layers": [2, 32]}, "32: the last of num_hidden_layers 32 is 31"),
    (EXPERTS, {"mlp_only_layers": [-1]}, "mlp_only_layers[0] -1"),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window True"),
    (MISTRAL, {"sliding_window": 4096}, "sliding_window is 4096"),
    (LLAMA, {"model_type": "mistral"}, "sliding_window absent means 4096"),
    (
        *(LLAMA, {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}}),
        "high_freq_factor 2.0: Megatron has 4.0 built in",
    ),
    (
        *(LLAMA, {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}),
        "original_max_position_embeddings 131072",
    ),
    (
        *(QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.3}}),
        "rope_scaling.attention_factor 1.3",
    ),
]


@pytest.mark.parametrize(("model", "changes", "named"), REFUSED)
def test_refused_by_name(
    model: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError) as error:
        read_config(write(tmp_path, model | changes))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert named in str(error.value)


@pytest.mark.parametrize("variant", ["qwen2-yarn", "qwen3_moe-mixed"])
def test_bash_reads_the_array_as_the_same_words(variant: str, tmp_path: Path) -> None:
    """Where a file has a name that the words would match, were they patterns."""
    tiny_config(variant).save_pretrained(tmp_path)
    (tmp_path / "0").touch()
    flags = model_flags(read_config(tmp_path))
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
    """Flipped one by one: equal logits, tensors that do not fit, or an error."""
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
            named = ("Error(s) in loading state_dict", "parameters are not those of config.json")
            assert any(text in result["unbuildable"] for text in named), changes
        elif "unbuildable" in result:
            assert name in OF_A_GPU, (changes, result)
        else:
            # In float64: memory lies elsewhere in another model, and sums are rounded otherwise.
            assert result["difference"] <= 1e-15, changes
    for name in ("no_rope_freq", "use_mup", "qk_l2_norm", "layernorm_epsilon", "softmax_type"):
        assert any("refused" in results[key] for key in results if f'"{name}"' in key), name
