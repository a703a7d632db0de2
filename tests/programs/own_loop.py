# SPDX-License-Identifier: Apache-2.0
"""Trains with the trainer of docs/INTEGRATION.md on gloo ranks; what happened goes to a JSON file.

Usage: own_loop.py TRAINER.py DATA_PREFIX OUTPUT_DIRECTORY, under torchrun. TRAINER.py holds the
document's code block as it stands. One rank trains without the plugin, to compare with, and makes
mistakes; two ranks train data-parallel and then as a pipeline.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from drawn_segments import plan_with_drawn_segments

from sparsebalance_megatron.megatron import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

from sparsebalance_megatron import SparseBalanceConfig, integration  # noqa: E402
from sparsebalance_megatron.data.packing import pack  # noqa: E402
from sparsebalance_megatron.data.samples import SampleIndex  # noqa: E402
from sparsebalance_megatron.learn import step_planner  # noqa: E402

STEPS = 4
DENSE = 1000
"""Budget of more blocks than any sample has."""
SIZES = {"vocab_size": 256, "seq_length": 256, "micro_batch_size": 1, "global_batch_size": 8}


def load_trainer(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location("trainer", path)
    trainer = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(trainer)
    return trainer


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


def balance_config(log_dir: Path | None = None, **changes: Any) -> SparseBalanceConfig:
    fields = {
        "block_size": 16,
        "base_budget": 4,
        "calibration": "off",
        "log_dir": None if log_dir is None else str(log_dir),
    }
    return SparseBalanceConfig(**(fields | changes))


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


def train_twice(trainer: Any, data: dict[str, Any], stages: int, directory: Path) -> dict[str, Any]:
    """Balanced, dense and untuned; then with tuned budgets, whole and interrupted."""
    result: dict[str, Any] = {}
    with pipeline(stages):
        dense = Losses()
        balance = balance_config(base_budget=DENSE, batching="latency", tuning="off")
        trainer.train(transformer_config(stages), balance, data, STEPS, dense)
        result["dense"] = dense.values
        tuned = Losses()
        balance = balance_config(directory / f"pp{stages}", tuning="makespan")
        trainer.train(transformer_config(stages), balance, data, STEPS, tuned)
        result |= {"tuned": tuned.values, "figures": tuned.figures}
        resumed = Losses()
        balance = balance_config(directory / f"pp{stages}-resumed", tuning="makespan")
        checkpoint = trainer.train(transformer_config(stages), balance, data, 2, resumed)
        trainer.train(transformer_config(stages), balance, data, STEPS - 2, resumed, checkpoint)
        result["resumed"] = resumed.values
    return result


def train_shared(trainer: Any, data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Dense, with rows on both ranks where that gives the shorter step."""
    with pipeline(1):
        losses = Losses()
        balance = balance_config(
            directory / "shared",
            base_budget=DENSE,
            tuning="off",
            max_context_parallel=2,
            # Counted operations take no time beside what travels at a bandwidth of this world.
            gigabytes_per_second=1e5,
        )
        trainer.train(transformer_config(), balance, data, STEPS, losses)
    return {"dense": losses.values}


def train_segments(trainer: Any, data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Dense, in drawn segments."""
    with pipeline(2), mock.patch.object(step_planner, "plan_step", plan_with_drawn_segments):
        losses = Losses()
        cut = {"max_segments": 4, "segment_tokens": 16}
        balance = balance_config(directory / "segments", base_budget=DENSE, tuning="off", **cut)
        trainer.train(transformer_config(2), balance, data, STEPS, losses)
        unwrapped = begin(data, model={"pipeline_model_parallel_size": 2}, balance=cut)
        mistake = error_of(lambda: integration.train_data_iterator(unwrapped))
    return {"dense": losses.values, "mistake": mistake}


def train_chunks(trainer: Any, data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A step of two stages with two model chunks each, without a data-parallel wrapper."""
    with pipeline(2, virtual_stages=2):
        # Gloo matches messages between two peers by order, which batched exchanges would break.
        config = transformer_config(
            2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=True, batch_p2p_comm=False
        )
        balance = balance_config(directory / "chunks", base_budget=DENSE, tuning="off")
        run = integration.begin_run(balance, config, **data)
        chunks = [_chunk(run, config, chunk) for chunk in range(2)]
        iterators = [integration.train_data_iterator(run, vp_stage=chunk) for chunk in range(2)]
        reports = get_forward_backward_func()(
            forward_step_func=integration.wrap_forward_step(run, trainer.forward_step),
            data_iterator=iterators,
            model=chunks,
            num_microbatches=run.micro_batches,
            seq_length=SIZES["seq_length"],
            micro_batch_size=1,
            forward_only=False,
        )
        losses = Losses()
        losses(reports, integration.on_step_end(run))
        return {"dense": losses.values}


def _chunk(run: Any, config: TransformerConfig, chunk: int) -> GPTModel:
    return gpt(
        config,
        integration.sparse_balance_layer_spec(run, vp_stage=chunk),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
    )


def plain_losses(data: dict[str, Any]) -> list[float]:
    """Megatron without the plugin on the same samples: dense attention, one document at a time."""
    index = SampleIndex.open(
        data["data_prefix"],
        max_tokens=data["seq_length"],
        overlong="split",
        seed=1234,
        split_weights="100,0,0",
        split="train",
    )
    config = transformer_config()
    model = gpt(config, get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    losses = []
    for step in range(STEPS):
        batch_size = data["global_batch_size"]
        samples = index.global_batch(step * batch_size, batch_size)
        rows = [pack([index.read(int(sample))]) for sample in samples]
        tokens = sum(row.loss_mask.sum() for row in rows)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            columns = (row.tokens, row.position_ids, row.labels, row.loss_mask)
            ids, positions, labels, mask = (torch.as_tensor(column)[None] for column in columns)
            loss = (model(ids, positions, None, labels=labels) * mask).sum()
            (loss / tokens).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total / tokens.item())
    return losses


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


class BareTrainer:
    """No data-parallel wrapper, no Megatron optimizer, no hooks in the config before ours."""

    def __init__(self, trainer: Any, data: dict[str, Any], log_dir: Path | None = None) -> None:
        self._trainer = trainer
        config = transformer_config()
        self.run = integration.begin_run(balance_config(log_dir), config, **data)
        own_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        self.model = gpt(config, integration.sparse_balance_layer_spec(self.run, own_spec))
        assert own_spec.submodules.self_attention.submodules.core_attention is DotProductAttention
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.forward_step = integration.wrap_forward_step(self.run, trainer.forward_step)
        self.iterator = integration.train_data_iterator(self.run)

    def evaluate(self) -> None:
        """The trainer's own forward step, with Megatron's own packing and with none."""
        cu_seqlens = torch.tensor([0, 100, 256], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=156,
            max_seqlen_kv=156,
        )
        ids = torch.arange(256)[None]
        batch = {"tokens": ids, "position_ids": ids, "labels": ids, "loss_mask": torch.ones(1, 256)}
        self.model.eval()
        get_forward_backward_func()(
            forward_step_func=self._trainer.forward_step,
            data_iterator=iter([batch | {"packed_seq_params": p} for p in (packed, None)]),
            model=[self.model],
            num_microbatches=2,
            seq_length=256,
            micro_batch_size=1,
            forward_only=True,
        )
        self.model.train()

    def schedule(self, micro_batches: int | None = None) -> None:
        get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.iterator,
            model=[self.model],
            num_microbatches=micro_batches or self.run.micro_batches,
            seq_length=SIZES["seq_length"],
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()


def bare(trainer: Any, data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Two steps of the bare trainer, then everything a loop can do wrong: name -> message."""
    with pipeline(1):
        loop = BareTrainer(trainer, data, directory / "bare")
        figures = []
        for _ in range(2):
            loop.evaluate()
            loop.schedule()
            loop.evaluate()
            figures.append(integration.on_step_end(loop.run))
        mistakes = {
            "step ended twice": lambda: integration.on_step_end(loop.run),
            "half a step": partial(_half_a_step, BareTrainer(trainer, data)),
            "step never ended": partial(_never_ended, BareTrainer(trainer, data)),
            "budgets left behind": partial(_without_budgets, BareTrainer(trainer, data)),
            "loss of two values": partial(_two_values, BareTrainer(trainer, data)),
            "resumed within a step": lambda: integration.train_data_iterator(
                loop.run, consumed_samples=3
            ),
            "nothing to save": lambda: begin(data).state_dict(),
            "resumed elsewhere": partial(_resume, loop.run.state_dict(), data, 8),
            "state of other data": partial(
                _resume, loop.run.state_dict(), {**data, "split": "80,20,0"}, 16
            ),
            "state after the iterator": lambda: loop.run.load_state_dict(loop.run.state_dict()),
            "attention dropout": lambda: begin(data, model={"attention_dropout": 0.1}),
            "loss per micro-batch": lambda: begin(data, model={"calculate_per_token_loss": False}),
            "dry run": lambda: begin(data, balance={"dry_run": 0}),
            "segments without a pipeline": lambda: begin(data, balance={"max_segments": 2}),
            "dense evaluation": lambda: begin(data, balance={"eval_attention": "dense"}),
            "another device": lambda: begin(data, balance={"device": "cuda"}),
            "no such data": lambda: begin({**data, "data_prefix": "/nonexistent/prefix"}),
            "uneven batch": lambda: begin({**data, "micro_batch_size": 3}),
        }
        return {
            "figures": figures,
            "mistakes": {name: error_of(mistake) for name, mistake in mistakes.items()},
        }


def begin(data: dict[str, Any], model: Any = None, balance: Any = None) -> Any:
    return integration.begin_run(
        balance_config(**(balance or {})), transformer_config(**(model or {})), **data
    )


def _half_a_step(loop: BareTrainer) -> None:
    loop.schedule(loop.run.micro_batches // 2)
    integration.on_step_end(loop.run)


def _never_ended(loop: BareTrainer) -> None:
    loop.schedule()
    loop.schedule()


def _without_budgets(loop: BareTrainer) -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses, lambda losses: (losses.sum(), torch.tensor(losses.numel()), {})

    loop.forward_step = integration.wrap_forward_step(loop.run, forward_step)
    loop.schedule()
    integration.on_step_end(loop.run)


def _two_values(loop: BareTrainer) -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        losses, _ = loop_forward_step(data_iterator, model)
        return losses, lambda losses: (losses.mean(), {})

    loop_forward_step = loop.forward_step._inner
    loop.forward_step = integration.wrap_forward_step(loop.run, forward_step)
    loop.schedule()


def _resume(state: dict[str, Any], data: dict[str, Any], consumed_samples: int) -> None:
    run = begin(data)
    run.load_state_dict(state)
    integration.train_data_iterator(run, consumed_samples=consumed_samples)


def error_of(mistake: Callable[[], Any]) -> str:
    try:
        mistake()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(trainer_path: str, data_prefix: str, output: str) -> None:
    trainer = load_trainer(Path(trainer_path))
    directory = Path(output)
    dist.init_process_group("gloo")
    data = SIZES | {"data_prefix": data_prefix}
    result: dict[str, Any] = {}
    if dist.get_world_size() == 1:
        result["bare"] = bare(trainer, data, directory)
        with pipeline(1):
            result["plain"] = plain_losses(data)
    else:
        for name, stages in (("dp2", 1), ("pp2", 2)):
            result[name] = train_twice(trainer, data, stages, directory)
        result["shared"] = train_shared(trainer, data, directory)
        result["segments"] = train_segments(trainer, data, directory)
        result["chunks"] = train_chunks(trainer, data, directory)
    result["loaded"] = sorted(name for name in sys.modules if name.startswith("megatron.training"))
    path = directory / f"world{dist.get_world_size()}-rank{dist.get_rank()}.json"
    path.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
