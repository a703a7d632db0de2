# SPDX-License-Identifier: Apache-2.0
"""Hugging Face to Megatron and back: logits, files to the bit, the loss of a real training step.

The models are random; `transformers` says what is right. One process runs all commands before
training, one all after it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.conversions import (
    DOCUMENT_LENGTHS,
    Conversions,
    assert_came_back,
    read_documents,
    reference_logits,
    reference_loss,
    succeeded,
)
from convert.tiny_models import VARIANTS, VOCABULARY, save, tiny_config, tiny_model
from harness import FEW_ROUNDINGS
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from sparsebalance_megatron import evaluate
from sparsebalance_megatron.selector_registry import BUILT_IN

pytestmark = pytest.mark.distributed

CAUSAL = tuple(BUILT_IN)
PACKED_LENGTHS = (100, 7, 230, 1, 64)
"""Tokens; blocks have 16."""
TOLERANCE = 1e-4
"""Largest difference of logits, whose size is about 7."""

TRAINED = {
    # Untied, scaled RoPE, padded vocabulary, split by tensors.
    "llama-llama3": (
        ("--make-vocab-size-divisible-by", "128"),
        ("--tensor-model-parallel-size", "2"),
    ),
    # Tied, biases, the embedding on both pipeline stages.
    "qwen2-tied": ((), ("--pipeline-model-parallel-size", "2")),
}
"""Model -> (flags for from-hf, layout of training)."""
KEY = "sparse_attention_config"
EARLIER = {
    "sparse_block_size": 32,
    "sparse_topk_blocks": 5,
    "sparse_selection": "token-kv-head",
    "sparse_layer_topk_blocks": [5, None],
    "sparse_dense_up_to_tokens": 192,
}
"""What the config.json of qwen2-tied asks for."""
TRAINED_ATTENTION = {
    "sparse_block_size": 16,
    "sparse_topk_blocks": 1000,
    "sparse_selection": "token-query-head",
}
TRAINED_LAYERS = {
    "llama-llama3": ({}, ()),
    "qwen2-tied": (
        {"sparse_layer_topk_blocks": [None, 1000], "sparse_dense_up_to_tokens": 256},
        ("--sparse-balance-layer-budgets", "dense:0", "--sparse-balance-dense-up-to", "256"),
    ),
}
"""Model -> what its config.json says besides once it is trained with these flags."""
ALWAYS_READ = {"sparse_local_block": 1, "sparse_init_block": 1}
SPARSE_BUDGET = 3
READINGS = [
    *((variant, "token-query-head", "", 1000) for variant in VARIANTS),
    *(("llama-llama3", selection, "", SPARSE_BUDGET) for selection in CAUSAL),
    ("llama-llama3", CAUSAL[0], "dense:1", SPARSE_BUDGET),
    ("qwen3-linear", CAUSAL[0], "", SPARSE_BUDGET),
    ("qwen3_moe-shares", CAUSAL[1], "", SPARSE_BUDGET),
]
"""Model, selection, budgets by layer and base budget."""
NIGHTLY = ("llama-linear", "llama-plain", "qwen2-untied")
REFUSED_FLAGS = {
    "--num-layers 5": "flags after -- make num_layers 5, ",
    "--pipeline-model-parallel-size 2": "flags after -- make pipeline_model_parallel_size 2, ",
    "--padded-vocab-size 249": "--padded-vocab-size 249: the model has 250 rows",
    "--num-experts 2": "flags after -- make num_moe_experts 2, ",
    "--norm-epsilon 1e-5": "flags after -- make layernorm_epsilon 1e-05, ",
    "--squared-relu": "or those of config.json: such as two activation functions",
}
REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 1}, "has shape [2, 64], --hf-config makes it [1, 64]"),
    "tied": ({"tie_word_embeddings": True}, "does not account for: output_layer.weight"),
    "wider": ({"intermediate_size": 128}, "linear_fc1.weight has shape [2, 192, 64], --hf-config"),
    "rows": ({"vocab_size": 300}, "embedding has 256 rows, config.json's vocab_size is 300"),
    "base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        "was trained with rope_scaling True, --hf-config makes it False",
    ),
    "vast": (
        {"hidden_size": 2**24, "intermediate_size": 2**24, "head_dim": 16},
        "hidden_size 16777216, intermediate_size 16777216 and vocab_size 250 exceeds",
    ),
    "epsilon": ({"rms_norm_eps": 1e-5}, "was trained with layernorm_epsilon 1e-06, --hf-config"),
}
PADDING_ROWS = {"llama-llama3": 6, "qwen2-tied": 0}


class Work(Conversions):
    """Everything that ran, by name, and where it left its files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        generator = torch.Generator().manual_seed(11)
        self.tokens = [
            torch.randint(VOCABULARY, (length,), generator=generator) for length in PACKED_LENGTHS
        ]
        (root / "tokens.json").write_text(json.dumps([row.tolist() for row in self.tokens]))
        for variant in VARIANTS:
            save(tiny_model(variant), self.hf(variant), max_shard_size="40KB")
        config = self.hf("qwen2-tied") / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {KEY: EARLIER}))
        self.before = self.run("before", self._commands_before())
        # One step over all documents that changes nothing, saved.
        steps = "--train-iters 1 --lr 1e-30 --save-interval 1 --sparse-balance-base-budget 1000"
        self.runs = {
            variant: self.train(
                variant, variant, *steps.split(), *layout, *TRAINED_LAYERS[variant][1]
            )
            for variant, (_, layout) in TRAINED.items()
        }
        self.after = self.run("after", self._commands_after())

    def logits(self, *reading: str | int) -> torch.Tensor:
        """Logits of the packed tokens by a model, selection, budgets by layer and base budget."""
        name = " ".join(map(str, reading))
        succeeded(self.before[name])
        return torch.load(self.root / f"{name}.pt")

    def _commands_before(self) -> dict[str, Sequence[str]]:
        from_hf = ("convert", "from-hf")
        tied = str(self.hf("qwen2-tied"))
        commands: dict[str, Sequence[str]] = {}
        for variant, selection, layers, budget in READINGS:
            name = f"{variant} {selection} {layers} {budget}"
            commands[name] = (
                *("logits", str(self.root / f"{name}.pt"), str(self.hf(variant))),
                *(str(self.root / "tokens.json"), str(budget), selection, layers),
            )
        for variant, (flags, _) in TRAINED.items():
            commands[f"convert {variant}"] = (
                *(*from_hf, str(self.hf(variant)), "--output", str(self.checkpoint(variant))),
                *("--", *flags),
            )
        for flags in ("--padded-vocab-size 300", *REFUSED_FLAGS):
            commands[flags] = (*from_hf, tied, "--print-flags", "--", *flags.split())
        no = ("--hf-config", tied, "--output", str(self.root / "no"))
        return commands | {"no checkpoint": ("convert", "to-hf", tied, *no)}

    def _commands_after(self) -> dict[str, Sequence[str]]:
        """The exports, and refusals of configurations that are not the checkpoint's."""
        for name, (changes, _) in REFUSED_CONFIGS.items():
            tiny_config("llama-llama3", **changes).save_pretrained(self.hf(name))
        trained = str(self.trained("llama-llama3"))
        commands: dict[str, Sequence[str]] = {
            f"export {variant}": self.export(variant, variant) for variant in TRAINED
        }
        for name in REFUSED_CONFIGS:
            commands[name] = (
                *("convert", "to-hf", trained, "--output", str(self.root / "no")),
                *("--hf-config", str(self.hf(name))),
            )
        commands["in bfloat16"] = (
            *("convert", "to-hf", trained, "--output", str(self.exported("bfloat16"))),
            *("--hf-config", str(self.hf("llama-llama3")), "--dtype", "bfloat16"),
            *("--iteration", "1"),
        )
        return commands | {"no iteration": (*commands["tied"], "--iteration", "7")}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("convert"))


@pytest.mark.parametrize(
    "reading",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each[0] in NIGHTLY)) for each in READINGS],
)
def test_logits_are_those_of_the_model_in_transformers(
    reading: tuple[str, str, str, int], work: Work
) -> None:
    """Every parameter held NaN before; documents of many blocks, packed, at budgets of all blocks
    and of few.

    The yardstick is float64: our error is at most twice that of `transformers` in float32.
    """
    ours = work.logits(*reading)
    variant, selection, layers, budget = reading
    model = tiny_model(variant)
    dense = reference_logits(model.double(), work.tokens)
    evaluate.configure(
        model,
        sparse_block_size=16,
        sparse_topk_blocks=budget,
        sparse_selection=selection,
        sparse_layer_topk_blocks=(budget, None) if layers else None,
    )
    if budget == SPARSE_BUDGET:
        model.set_attn_implementation(evaluate.NAME)
    exact = reference_logits(model, work.tokens)
    plain = reference_logits(model.float(), work.tokens)
    error = (ours - exact).abs().max()
    assert error <= 2 * (plain - exact).abs().max()
    assert error <= TOLERANCE
    assert ((exact - dense).abs().max() > 1000 * TOLERANCE) == (budget == SPARSE_BUDGET)


def test_checkpoints_name_tensors_as_both_layer_specs_do(work: Work) -> None:
    """Transformer Engine fuses norms into linear layers; Megatron's names in files say so."""
    metadata = FileSystemReader(work.checkpoint("llama-llama3") / "release").read_metadata()
    layer = "decoder.layers"
    assert {
        name: tuple(tensor.size)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    } == {
        "embedding.word_embeddings.weight": (256, 64),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": (2, 64),
        f"{layer}.self_attention.linear_qkv.weight": (2, 128, 64),
        f"{layer}.self_attention.linear_proj.weight": (2, 64, 64),
        f"{layer}.mlp.linear_fc1.layer_norm_weight": (2, 64),
        f"{layer}.mlp.linear_fc1.weight": (2, 192, 64),
        f"{layer}.mlp.linear_fc2.weight": (2, 64, 96),
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (256, 64),
    }


@pytest.mark.parametrize("variant", TRAINED)
def test_the_first_training_step_has_the_loss_of_transformers(variant: str, work: Work) -> None:
    """On two ranks, through --load --finetune."""
    documents = read_documents(work.documents)
    expected = reference_loss(tiny_model(variant).double(), documents, PADDING_ROWS[variant])
    (step,) = work.runs[variant].steps
    assert step["tokens"] == sum(DOCUMENT_LENGTHS) - len(DOCUMENT_LENGTHS)
    assert step["lm_loss"] == pytest.approx(expected, rel=FEW_ROUNDINGS)


@pytest.mark.parametrize("variant", TRAINED)
def test_what_training_saved_is_what_came_in_to_the_bit(variant: str, work: Work) -> None:
    """Loaded and saved on two ranks with optimizer state; the padding rows fall away."""
    printed = succeeded(work.after[f"export {variant}"])
    assert f"{VOCABULARY} rows, {PADDING_ROWS[variant]} rows of padding dropped" in printed
    assert_came_back(work.exported(variant), tiny_model(variant))
    for name in ("config.json", "generation_config.json"):
        copied = json.loads((work.exported(variant) / name).read_text())
        if name == "config.json":
            attention = TRAINED_ATTENTION | ALWAYS_READ | TRAINED_LAYERS[variant][0]
            assert copied.pop(KEY) == attention
        expected = json.loads((work.hf(variant) / name).read_text())
        expected.pop(KEY, None)
        # Further keys of config.json are those of transformers 4.
        assert copied.items() >= expected.items()


def test_another_dtype_is_rounded_once_and_said(work: Work) -> None:
    printed = succeeded(work.after["in bfloat16"])
    assert "numbers of bfloat16, 21 tensors cast" in printed
    written = load_file(work.exported("bfloat16") / "model.safetensors")
    for name, weight in tiny_model("llama-llama3").named_parameters():
        assert torch.equal(written[name], weight.to(torch.bfloat16)), name
    loaded = AutoModelForCausalLM.from_pretrained(work.exported("bfloat16"))
    assert loaded.dtype == torch.bfloat16


def test_the_attention_of_config_json_comes_as_flags(work: Work) -> None:
    text = succeeded(work.before["convert qwen2-tied"])
    array = text.partition("SPARSE_BALANCE_ARGS=(")[2].partition(")")[0]
    assert array.split() == [
        *("--sparse-balance", "--sparse-balance-block-size", "32"),
        *("--sparse-balance-base-budget", "5", "--sparse-balance-layer-budgets", "dense:1"),
        *("--sparse-balance-dense-up-to", "192"),
        *("--sparse-balance-selection", "token-kv-head"),
        *("--sparse-balance-first-blocks", "1"),
    ]
    assert "SPARSE_BALANCE_ARGS" not in succeeded(work.before["convert llama-llama3"])
    converted = (work.checkpoint("qwen2-tied") / "model_args.sh").read_text()
    rows = f"--padded-vocab-size {VOCABULARY}"
    assert succeeded(work.before["--padded-vocab-size 300"]) == converted.replace(
        rows, "--padded-vocab-size 300"
    )
    # These weights came with another block size and selection than the run has.
    output = work.runs["qwen2-tied"].output
    assert output.count("--sparse-balance-block-size is 16; these weights") == 1
    assert output.count("--sparse-balance-selection is token-query-head; these weights") == 1
    assert "these weights" not in work.runs["llama-llama3"].output


REFUSED = REFUSED_FLAGS | {name: text for name, (_, text) in REFUSED_CONFIGS.items()}
REFUSED |= {
    "no checkpoint": "the latest iteration is not a torch_dist checkpoint",
    "no iteration": "iteration 7 is not a torch_dist checkpoint",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line_and_writes_nothing(case: str, work: Work) -> None:
    result = (work.before | work.after)[case]
    assert result["status"] == 2, result["stderr"][-4000:]
    (line,) = [line for line in result["stderr"].splitlines() if "sparse-balance: error:" in line]
    assert REFUSED[case] in line
    assert not (work.root / "no").exists()
