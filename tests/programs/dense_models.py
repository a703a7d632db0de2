# SPDX-License-Identifier: Apache-2.0
"""Megatron's models on whole documents, with its own attention and with the plugin's, printed.

Run in a process of its own: the CPU adapter stays installed. The argument is a JSON object, variant
-> Megatron's flags. Prints another: variant -> how far float32 losses and gradients lie from
Megatron's float64, as root mean square, for Megatron itself, and for the plugin on packed
documents with covering budgets and with dense layers.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import torch

from sparsebalance_megatron.megatron import cpu

cpu.install()
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from micro_batches import BLOCK, params_with  # noqa: E402

from sparsebalance_megatron.config import SparseBalanceConfig  # noqa: E402
from sparsebalance_megatron.megatron.arguments import args_provider  # noqa: E402
from sparsebalance_megatron.megatron.compat import default_layer_spec, gpt_model  # noqa: E402
from sparsebalance_megatron.megatron.core_attention import (  # noqa: E402
    AttentionOptions,
    sparse_balance_layer_spec,
)

LENGTHS = (100, 37, 192)
VOCABULARY = 256


def main(variants: dict[str, list[str]]) -> None:
    torch.distributed.init_process_group(
        backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    with contextlib.redirect_stdout(io.StringIO()):
        errors = {name: compare(flags) for name, flags in variants.items()}
    print(json.dumps(errors))


def compare(flags: list[str]) -> dict[str, dict[str, float]]:
    """Root mean square errors of losses and of gradients, of both models."""
    sys.argv = ["dense_models", *flags]
    args = parse_args(args_provider(enabled=False, on_cpu=True))
    validate_args(args)
    args.padded_vocab_size = VOCABULARY
    torch.manual_seed(7)
    exact = build(args, megatron_layer_spec).double()
    with torch.no_grad():
        # Initial weights give nearly equal scores, on which no temperature shows.
        for name, parameter in exact.named_parameters():
            if any(
                each in name for each in ("linear_qkv.weight", "up_proj.weight", "linear_q_proj")
            ):
                parameter.mul_(8)
    models = {
        "megatron": build(args, megatron_layer_spec),
        "plugin": build(args, plugin_layer_spec(base_budget=1000)),
        "dense layers": build(args, plugin_layer_spec(layer_budgets="dense:1-2 1000:0")),
    }
    truth = losses_and_gradients(exact, on_documents)
    result = {}
    for name, model in models.items():
        model.load_state_dict(exact.state_dict())
        run = on_documents if name == "megatron" else packed
        found = losses_and_gradients(model, run)
        result[name] = {
            "losses": root_mean_square(found[0] - truth[0]),
            "gradients": root_mean_square(found[1] - truth[1]),
        }
    return result


def build(args, layer_spec):
    config = core_transformer_config_from_args(args)
    return gpt_model(args, config, layer_spec(config, None)).float().train()


class LatentCoreAttention(DotProductAttention):
    """Megatron's own, with what its multi-latent attention hands to Transformer Engine's."""

    def __init__(self, *arguments, k_channels=None, v_channels=None, **keywords):
        super().__init__(*arguments, **keywords)


def megatron_layer_spec(config, vp_stage):
    spec = default_layer_spec(config, vp_stage)
    if config.multi_latent_attention:
        spec.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    return spec


def plugin_layer_spec(**budgets):
    config = SparseBalanceConfig(block_size=BLOCK, **budgets)
    return sparse_balance_layer_spec(AttentionOptions(config, grid=(1, 1000)))


def losses_and_gradients(model, run):
    """Losses of all tokens, and all gradients of their sum, as two vectors in float64."""
    losses = run(model)
    losses.sum().backward()
    gradients = [parameter.grad.double().flatten() for parameter in model.parameters()]
    return losses.detach().double(), torch.cat(gradients)


def token_rows():
    """Tokens and labels of every document."""
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, VOCABULARY, length + 1) for length in LENGTHS]
    return [(torch.tensor(row[:-1]), torch.tensor(row[1:])) for row in rows]


def on_documents(model):
    """Megatron's own attention, one document after the other."""
    losses = []
    for tokens, labels in token_rows():
        length = len(tokens)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(length)[None]
        losses.append(model(tokens[None], positions, mask, labels=labels[None]).flatten())
    return torch.cat(losses)


def packed(model):
    """The plugin's attention, all documents in one row, budgets that cover everything."""
    tokens, labels = (torch.cat(rows)[None] for rows in zip(*token_rows(), strict=True))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    params = params_with(LENGTHS, np.full((model.config.num_layers, len(LENGTHS)), 1000))
    return model(tokens, positions, None, labels=labels, packed_seq_params=params).flatten()


def root_mean_square(errors) -> float:
    return float(errors.square().mean().sqrt())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
