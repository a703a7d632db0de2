# SPDX-License-Identifier: Apache-2.0
"""A small GPT and what a loop around Megatron's schedules needs; import after the CPU adapter."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from sparsebalance_megatron import SparseBalanceConfig

STEPS = 4
SIZES = {"vocab_size": 256, "seq_length": 256, "micro_batch_size": 1, "global_batch_size": 8}


def initial_weights(weights: torch.Tensor, scale: float = 0.05) -> torch.Tensor:
    """Fill weights with values that depend on their shape alone: alike on every layout."""
    generator = torch.Generator().manual_seed(weights.numel() + weights.shape[0])
    return weights.data.copy_(torch.randn(weights.shape, generator=generator) * scale)


def transformer_config(pipeline_stages: int = 1, **changes: Any) -> TransformerConfig:
    fields = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        "pipeline_model_parallel_size": pipeline_stages,
        "pipeline_dtype": torch.float32,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "init_method": initial_weights,
        "output_layer_init_method": initial_weights,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**(fields | changes))


def balance_config(**choices: Any) -> SparseBalanceConfig:
    fields = {"block_size": 16, "base_budget": 4, "dense_up_to": "0", "calibration": "off"}
    return SparseBalanceConfig(**(fields | choices))


@contextmanager
def pipeline(stages: int, virtual_stages: int | None = None, **sizes: int) -> Any:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual_stages,
        **sizes,
    )
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()


class Losses:
    """Collects every step's loss from the trainer's own reports, over all ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.figures: list[dict[str, float]] = []

    def __call__(self, reports: list[dict[str, torch.Tensor]], figures: dict[str, float]) -> None:
        assert all(set(report) == {"loss"} for report in reports)
        total = sum((report["loss"].double() for report in reports), torch.zeros(2).double())
        dist.all_reduce(total)
        self.values.append((total[0] / total[1]).item())
        self.figures.append(figures)


def check_told(mistakes: Mapping[str, Callable[[], Any]]) -> None:
    """Whether each mistake ends with an error that says what is its name."""
    for told, mistake in mistakes.items():
        try:
            mistake()
        except (ValueError, RuntimeError) as error:
            assert told in f"{type(error).__name__}: {error}", (told, error)
        else:
            raise AssertionError(f"accepted, and not: {told}")


def thd_params(boundaries: torch.Tensor) -> PackedSeqParams:
    """Megatron's own parameters of a packed sequence."""
    longest = int(boundaries.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def gpt(config: TransformerConfig, spec: Any, **chunk: Any) -> GPTModel:
    return GPTModel(
        config,
        spec,
        vocab_size=SIZES["vocab_size"],
        max_sequence_length=SIZES["seq_length"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **chunk,
    )


def schedule(
    forward_step: Any, iterator: Any, model: Any, count: int, *, forward_only: bool = False
) -> Any:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=model,
        num_microbatches=count,
        seq_length=SIZES["seq_length"],
        micro_batch_size=1,
        forward_only=forward_only,
    )


def module_at(name: str, path: str) -> Any:
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def batches(count: int = STEPS, first: int = 0) -> list[list[torch.Tensor]]:
    """Every step has another number of samples, of long-tailed lengths."""
    made = []
    for step in range(first, first + count):
        generator = np.random.default_rng(step)
        lengths = np.clip(generator.lognormal(np.log(40), 0.9, 8 + 2 * (step % 2)), 4, 250)
        made.append([_tokens(generator, int(length) + 1) for length in lengths])
    return made


def _tokens(generator: np.random.Generator, length: int) -> torch.Tensor:
    return torch.as_tensor((generator.random(length) ** 3 * 255).astype(np.int64))


def lengths_of(batch: list[torch.Tensor]) -> list[int]:
    return [len(sample) - 1 for sample in batch]
