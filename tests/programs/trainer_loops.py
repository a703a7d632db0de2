# SPDX-License-Identifier: Apache-2.0
"""Trains with examples/hosts/own_loop.py and own_data.py; results go to a JSON file.

Usage: trainer_loops.py trainer|host CODE.py OUTPUT_DIRECTORY [DATA_PREFIX]. CODE.py is one of these
examples. ``trainer`` owns its loop: one rank trains
without the plugin, to compare with, and makes mistakes; two train data-parallel and then as a
pipeline. ``host`` owns its data as well: two ranks run their micro-batches alone and make mistakes,
four share them; one rank is what both are compared with.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from drawn_segments import plan_with_drawn_segments

from sparsebalance_megatron.megatron import cpu

cpu.install()

import numpy as np  # noqa: E402
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
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from small_gpt import (  # noqa: E402
    SIZES,
    Losses,
    balance_config,
    error_of,
    gpt,
    module_at,
    pipeline,
    schedule,
    thd_params,
    transformer_config,
)

from sparsebalance_megatron import integration  # noqa: E402
from sparsebalance_megatron.attention.select import selector_named  # noqa: E402
from sparsebalance_megatron.data.packing import pack  # noqa: E402
from sparsebalance_megatron.data.samples import SampleIndex  # noqa: E402
from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention  # noqa: E402

STEPS = 4
DENSE: dict[str, Any] = {"base_budget": 1000, "tuning": "off"}
"""Budgets of more blocks than any sample has."""
FAST: dict[str, Any] = {"gigabytes_per_second": 1e5}
"""Counted operations take no time beside what travels at a bandwidth of this world."""
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
}
"""Two ranks that wait for one another in every layer."""
TUNED: dict[str, Any] = {"tuning": "anchor", "batching": "arrival", "coverage_threshold": 0.3}
"""Budgets are cut and raised."""
HOST_SIZES = {"vocab_size": 256, "max_sample_tokens": 250, "global_batch_size": 8}


class Trainer:
    """The document's trainer on a data set; logs go to directories below one."""

    def __init__(self, block: Any, directory: Path, data_prefix: str) -> None:
        self.block, self.directory = block, directory
        self.data = SIZES | {"data_prefix": data_prefix}

    def train(
        self,
        losses: Losses,
        stages: int = 1,
        *,
        log: str | None = None,
        steps: int = STEPS,
        checkpoint: Any = None,
        model: Any = None,
        **choices: Any,
    ) -> Any:
        config = balance_config(log_dir=log and str(self.directory / log), **choices)
        fields = transformer_config(stages, **(model or {}))
        return self.block.train(fields, config, self.data, steps, losses, checkpoint)

    def begin(self, model: Any = None, data: Any = None, **choices: Any) -> Any:
        config = transformer_config(**(model or {}))
        return integration.begin_run(
            balance_config(**choices), config, **(self.data | (data or {}))
        )

    def twice(self, stages: int) -> dict[str, Any]:
        """Balanced, dense and untuned; then with tuned budgets, whole and interrupted."""
        dense, tuned, resumed, log = Losses(), Losses(), Losses(), f"pp{stages}"
        with pipeline(stages):
            self.train(dense, stages, batching="latency", **DENSE)
            self.train(tuned, stages, log=log, **TUNED)
            log += "-resumed"
            checkpoint = self.train(resumed, stages, log=log, steps=2, **TUNED)
            self.train(resumed, stages, log=log, steps=2, checkpoint=checkpoint, **TUNED)
        return {
            "dense": dense.values,
            "tuned": tuned.values,
            "figures": tuned.figures,
            "resumed": resumed.values,
        }

    def shared(self) -> dict[str, Any]:
        """Dense, with micro-batches on both ranks where one holds too few tokens."""
        losses, shares = Losses(), {"max_context_parallel": 2, "max_tokens_per_micro_batch": 128}
        with pipeline(1):
            self.train(losses, log="shared", **shares, **DENSE, **FAST)
        return {"dense": losses.values}

    def positions(self) -> dict[str, Any]:
        """In planned and in fixed numbers of micro-batches; and the number without the schedule."""
        with pipeline(1, expert_model_parallel_size=2):
            losses = {name: Losses() for name in ("planned", "fixed")}
            for name, of_way in losses.items():
                self.train(of_way, log=name, model=EXPERTS, positions=name, **DENSE)
            unwrapped = self.begin(EXPERTS, **DENSE)
            number = unwrapped.train_data_iterator().next_step().micro_batches
        found = {name: of_way.values for name, of_way in losses.items()}
        return found | {"unwrapped": [number, unwrapped.micro_batches]}

    def segments(self) -> dict[str, Any]:
        """Dense, in drawn segments."""
        losses, cut = Losses(), {"max_segments": 4, "segment_tokens": 16}
        with pipeline(2), mock.patch.object(step_planner, "plan_step", plan_with_drawn_segments):
            self.train(losses, 2, log="segments", **DENSE, **cut)
            unwrapped = self.begin({"pipeline_model_parallel_size": 2}, **cut)
            return {"dense": losses.values, "mistake": error_of(unwrapped.train_data_iterator)}

    def chunks(self) -> dict[str, Any]:
        """A step of two stages with two model chunks each, without a data-parallel wrapper."""
        with pipeline(2, virtual_stages=2):
            # Gloo matches messages between two peers by order, which batched exchanges would break.
            config = transformer_config(
                2,
                virtual_pipeline_model_parallel_size=2,
                overlap_p2p_comm=True,
                batch_p2p_comm=False,
            )
            balance = balance_config(log_dir=str(self.directory / "chunks"), **DENSE)
            run = integration.begin_run(balance, config, **self.data)
            chunks = [_chunk(run, config, chunk) for chunk in range(2)]
            iterators = [run.train_data_iterator(vp_stage=chunk) for chunk in range(2)]
            losses, step = Losses(), run.wrap_forward_step(self.block.forward_step)
            losses(schedule(step, iterators, chunks, run.micro_batches), run.end_step())
            return {"dense": losses.values}

    def plain_losses(self) -> list[float]:
        """Megatron without the plugin on the same samples: dense, one document at a time."""
        index = SampleIndex.open(
            self.data["data_prefix"],
            max_tokens=SIZES["seq_length"],
            overlong="split",
            seed=1234,
            split_weights="100,0,0",
            split="train",
        )
        config = transformer_config()
        model = gpt(config, get_gpt_layer_local_spec(normalization="RMSNorm"))
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
        losses, batch_size = [], SIZES["global_batch_size"]
        for step in range(STEPS):
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

    def bare(self) -> dict[str, Any]:
        """Two steps of the bare trainer, then everything a loop can do wrong: name -> message."""
        loop, figures = BareTrainer(self, str(self.directory / "bare")), []
        for _ in range(2):
            loop.evaluate()
            loop.schedule()
            loop.evaluate()
            figures.append(loop.run.end_step())
        run, begin = loop.run, self.begin

        def resume(consumed_samples: int, **data: Any) -> None:
            other = begin(data=data)
            other.load_state_dict(run.state_dict())
            other.train_data_iterator(consumed_samples=consumed_samples)

        mistakes = {
            "step ended twice": run.end_step,
            "half a step": BareTrainer(self).half_a_step,
            "step never ended": BareTrainer(self).never_ended,
            "budgets left behind": BareTrainer(self).without_budgets,
            "loss of two values": BareTrainer(self).two_values,
            "resumed within a step": lambda: run.train_data_iterator(consumed_samples=3),
            "nothing to save": lambda: begin().state_dict(),
            "resumed elsewhere": lambda: resume(8),
            "state of other data": lambda: resume(16, split="80,20,0"),
            "state after the iterator": lambda: run.load_state_dict(run.state_dict()),
            "attention dropout": lambda: begin({"attention_dropout": 0.1}),
            "loss per micro-batch": lambda: begin({"calculate_per_token_loss": False}),
            "dry run": lambda: begin(dry_run=0),
            "segments without a pipeline": lambda: begin(max_segments=2),
            "dense evaluation": lambda: begin(eval_attention="dense"),
            "another device": lambda: begin(device="cuda"),
            "no such data": lambda: begin(data={"data_prefix": "/nonexistent/prefix"}),
            "uneven batch": lambda: begin(data={"micro_batch_size": 3}),
        }
        found = {name: error_of(mistake) for name, mistake in mistakes.items()}
        return {"figures": figures, "mistakes": found}

    def told_of_half_a_step_elsewhere(self) -> str:
        with pipeline(1):
            loop = BareTrainer(self)
            loop.schedule(loop.run.micro_batches // (1 + dist.get_rank()))
            said = [error_of(loop.run.end_step)]
            dist.broadcast_object_list(said, src=0)
            return said[0]

    def results(self) -> dict[str, Any]:
        if dist.get_world_size() == 1:
            with pipeline(1):
                return {"bare": self.bare(), "plain": self.plain_losses()}
        return {
            "dp2": self.twice(1),
            "pp2": self.twice(2),
            "one rank only": self.told_of_half_a_step_elsewhere(),
            "shared": self.shared(),
            "positions": self.positions(),
            "segments": self.segments(),
            "chunks": self.chunks(),
        }


def _chunk(run: Any, config: TransformerConfig, chunk: int) -> GPTModel:
    place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
    return gpt(
        config,
        run.layer_spec(vp_stage=chunk),
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=chunk,
    )


class BareTrainer:
    """No data-parallel wrapper, no Megatron optimizer, no hooks in the config before ours."""

    def __init__(self, trainer: Trainer, log_dir: str | None = None) -> None:
        self._own_step = trainer.block.forward_step
        config = transformer_config()
        self.run = integration.begin_run(balance_config(log_dir=log_dir), config, **trainer.data)
        own_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        self.model = gpt(config, self.run.layer_spec(own_spec))
        assert own_spec.submodules.self_attention.submodules.core_attention is DotProductAttention
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.forward_step = self.run.wrap_forward_step(self._own_step)
        self.iterator = self.run.train_data_iterator()

    def evaluate(self) -> None:
        """The trainer's own forward step, with Megatron's own packing and with none."""
        packed = thd_params(torch.tensor([0, 100, 256], dtype=torch.int32))
        ids = torch.arange(256)[None]
        batch = {"tokens": ids, "position_ids": ids, "labels": ids, "loss_mask": torch.ones(1, 256)}
        batches = iter([batch | {"packed_seq_params": params} for params in (packed, None)])
        self.model.eval()
        schedule(self._own_step, batches, [self.model], 2, forward_only=True)
        self.model.train()

    def schedule(self, micro_batches: int | None = None) -> None:
        count = micro_batches or self.run.micro_batches
        schedule(self.forward_step, self.iterator, [self.model], count)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def half_a_step(self) -> None:
        self.schedule(self.run.micro_batches // 2)
        self.run.end_step()

    def never_ended(self) -> None:
        self.schedule()
        self.schedule()

    def without_budgets(self) -> None:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            batch = next(data_iterator)
            losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            return losses, lambda losses: (losses.sum(), torch.tensor(losses.numel()), {})

        self.forward_step = self.run.wrap_forward_step(forward_step)
        self.schedule()
        self.run.end_step()

    def two_values(self) -> None:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            losses, _ = self._own_step(data_iterator, model)
            return losses, lambda losses: (losses.mean(), {})

        self.forward_step = self.run.wrap_forward_step(forward_step)
        self.schedule()


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


@contextmanager
def executed_budgets() -> Any:
    """Budgets of all samples that layers attended to, and selectors were asked for, in order.

    Samples that their budgets cover come first and need no selector.
    """
    kind, seen = type(selector_named("token-kv-head")), []
    own, attend = kind.select, BudgetedCoreAttention._attend

    def select(selector: Any, ranking: Any, budgets_S: torch.Tensor) -> Any:
        executed = budgets_S.tolist()
        assert executed, "a selector was asked for no sample"
        seen[-1][-len(executed) :] = executed
        return own(selector, ranking, budgets_S)

    def layer(module: Any, q_THD: Any, k_TGD: Any, v_TGF: Any, context: Any, kept: Any) -> Any:
        seen.append(context.budgets_LS[module._layer_index].tolist())
        return attend(module, q_THD, k_TGD, v_TGF, context, kept)

    with (
        mock.patch.object(kind, "select", select),
        mock.patch.object(BudgetedCoreAttention, "_attend", layer),
    ):
        yield seen


class Host:
    """The document's host."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def train(
        self,
        losses: Losses,
        stages: int,
        some: Any,
        state: Any = None,
        model: Any = None,
        **choices: Any,
    ) -> Any:
        config = transformer_config(stages, **(model or {}))
        return self.block.train(config, balance_config(**choices), HOST_SIZES, some, losses, state)

    def shared(self) -> dict[str, Any]:
        """Dense; where a rank holds at most 64 tokens, and in layouts of which each has two
        groups."""
        layouts = {
            "data": (1, 1, {"max_context_parallel": 4, "max_tokens_per_micro_batch": 64}),
            "pipeline": (2, 1, {"max_context_parallel": 2, "max_tokens_per_micro_batch": 128}),
            "context": (1, 2, {"context_parallel": "static"}),
        }
        result: dict[str, Any] = {}
        run_schedule = self.block.run_schedule
        for name, (stages, cp_size, choices) in layouts.items():
            cp_sizes: set[int] = set()

            def recorded(*given: Any, seen: Any = cp_sizes) -> Any:
                seen |= {micro_batch.cp_size for micro_batch in given[2].plan.micro_batches}
                return run_schedule(*given)

            losses, context = Losses(), {"context_parallel_size": cp_size}
            with pipeline(stages, context_parallel_size=cp_size):
                with mock.patch.object(self.block, "run_schedule", recorded):
                    ended, _, model = self.train(
                        losses, stages, batches(), None, context, **DENSE, **FAST, **choices
                    )
                result[name] = {"losses": losses.values, "cp_sizes": sorted(cp_sizes)}
                if name == "data":
                    result[name] |= self.shared_passes(ended, model)
        return result

    def positions(self) -> dict[str, Any]:
        """Losses and numbers of micro-batches of experts, as the plan chooses and the least."""
        found: dict[str, Any] = {}
        run_schedule = self.block.run_schedule
        for name in ("planned", "fixed"):
            numbers: list[int] = []

            def recorded(*given: Any, seen: Any = numbers) -> Any:
                seen.append(given[2].micro_batches)
                return run_schedule(*given)

            losses = Losses()
            with (
                pipeline(1, expert_model_parallel_size=2),
                mock.patch.object(self.block, "run_schedule", recorded),
            ):
                self.train(losses, 1, batches(), model=EXPERTS, positions=name, **DENSE)
            found[name] = {"losses": losses.values, "numbers": numbers}
        return found

    def shared_passes(self, ended: Any, model: Any) -> dict[str, Any]:
        """A pass that learns nothing, what a rank is given, and mistakes."""
        (batch,) = batches(1, 9)
        rank = parallel_state.get_data_parallel_rank()
        planned = ended.planner.plan(lengths_of(batch))
        self.block.run_schedule(ended, model, planned, batch, forward_only=True)
        held = []
        for position, micro_batch in enumerate(planned.plan.for_rank(rank).micro_batches):
            values = {
                "places": torch.arange(micro_batch.tokens, dtype=torch.float, requires_grad=True),
                "positions": torch.cat([torch.arange(each) for each in micro_batch.lengths_tokens]),
            }
            cut = ended.cut(planned, position, values)
            whole = ended.whole(planned, position, {"places": cut["places"]})["places"]
            whole.sum().backward()
            found = {**cut, "whole": whole, "own": values["places"].grad}
            held.append(
                {name: values.tolist() for name, values in found.items()}
                | {"first rank": micro_batch.rank}
            )

        def other_plans() -> None:
            step = planned if rank == 0 else ended.planner.plan(lengths_of(batch), step=99)
            self.block.run_schedule(ended, model, step, batch, forward_only=True)

        own = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5]))
        missing = {"labels": torch.zeros(3)}
        mistakes = {
            "own parameters": lambda: ended.attach(planned, 0, own, model=model),
            "no model": lambda: ended.attach(planned, 0),
            "missing labels": lambda: ended.cut(planned, 0, missing),
            "other plans": other_plans,
        }
        return {"held": held, "mistakes": {name: error_of(do) for name, do in mistakes.items()}}

    def own_parameters(self, ended: Any, model: Any) -> list[float]:
        """A step of a host that packs its sequences itself, and one where it does not."""
        (batch,) = batches(1, 9)
        planned = ended.planner.plan(lengths_of(batch))
        attach, losses = ended.attach, Losses()

        def attach_own(planned: Any, position: int, **others: Any) -> Any:
            rank = parallel_state.get_data_parallel_rank()
            lengths = planned.plan.for_rank(rank).micro_batches[position].lengths_tokens
            own = thd_params(torch.tensor([0, *lengths]).cumsum(0).int())
            return attach(planned, position, own, **others)

        for way in (attach, attach_own):
            model.zero_grad_buffer()
            with mock.patch.object(ended, "attach", way):
                losses(self.block.run_schedule(ended, model, planned, batch), ended.end_step())
        return losses.values

    def all_layouts(self, stages: int) -> dict[str, Any]:
        with pipeline(stages):
            dense = Losses()
            self.train(dense, stages, batches(2), **DENSE)
            if stages > 1:
                return {"dense": dense.values}
            plain, tuned, resumed = Losses(), Losses(), Losses()
            self.train(plain, 1, batches(2), batching="length", **DENSE)
            ended, _, model = self.train(tuned, 1, batches(), **TUNED)
            _, state, _ = self.train(resumed, 1, batches(2), **TUNED)
            self.train(resumed, 1, batches(2, 2), state, **TUNED)
            return {
                "dense": dense.values,
                "otherwise placed": plain.values,
                "tuned": tuned.values,
                "resumed": resumed.values,
                "figures": tuned.figures,
                "as placed": as_placed(ended),
                "own parameters": self.own_parameters(ended, model),
                "pinned": self.pinned_passes(ended, model),
                "mistakes": self.mistakes(ended, model),
            }

    def pinned_passes(self, ended: Any, model: Any) -> dict[str, Any]:
        """A forward-only pass and its update, at budgets far below the base budget."""
        (batch,) = batches(1, 9)
        run_schedule, plan = self.block.run_schedule, partial(ended.planner.plan, lengths_of(batch))
        planned = plan()
        with executed_budgets() as forward:
            run_schedule(ended, model, planned, batch, forward_only=True)
        update = plan(pinned_LS=np.ones_like(planned.plan.budgets_LS))
        with executed_budgets() as pinned:
            run_schedule(ended, model, update, batch)
        ended.end_step()
        return {
            "forward": forward,
            "forward planned": _by_layer(planned),
            "update": pinned,
            "update planned": _by_layer(update),
        }

    def mistakes(self, ended: Any, model: Any) -> dict[str, str]:
        """Name -> message, of everything a host can do wrong."""
        (batch,) = batches(1)
        run_schedule, plan = self.block.run_schedule, ended.planner.plan
        planned, rank = plan(lengths_of(batch)), parallel_state.get_data_parallel_rank()
        boundaries = torch.tensor([0, 5, 9], dtype=torch.int32)

        def half_a_step() -> None:
            run_schedule(ended, model, planned, batch)
            if rank == 1:
                ended._run.seen.pop()
            ended.end_step()

        def other_plans() -> None:
            ended._run.begin_step()
            step = planned if rank == 0 else plan(lengths_of(batch), step=99)
            run_schedule(ended, model, step, batch)
            ended.end_step()

        found = {
            "wrong row": lambda: ended.attach(planned, 0, thd_params(boundaries)),
            "other format": lambda: ended.attach(planned, 0, PackedSeqParams(qkv_format="sbhd")),
            "no such micro-batch": lambda: ended.attach(planned, 99),
            "one rank only": half_a_step,
            "other plans": other_plans,
            "step never ended": lambda: run_schedule(
                ended, model, plan([9] * 4), [batch[0][:10]] * 4
            ),
            "step log": lambda: self.train(Losses(), 1, (), log_dir="here"),
        }
        return {name: error_of(mistake) for name, mistake in found.items()}

    def results(self) -> dict[str, Any]:
        if dist.get_world_size() == 2:
            layouts = {f"pp{stages}": self.all_layouts(stages) for stages in (1, 2)}
            return layouts | {"positions": self.positions()}
        if dist.get_world_size() == 4:
            return self.shared()
        with pipeline(1):
            alone = Losses()
            self.train(alone, 1, batches(), **DENSE)
            return {"dense": alone.values}


def as_placed(ended: Any) -> Any:
    """Each rank knows its own micro-batches; the plan is that of both."""
    rank = parallel_state.get_data_parallel_rank()
    plan = ended.plan_as_placed([[10 + rank, 20], [30]]).plan
    return [[each.rank, each.position, each.lengths_tokens] for each in plan.micro_batches]


def _by_layer(planned: Any) -> list[list[int]]:
    own = planned.plan.for_rank(parallel_state.get_data_parallel_rank())
    return [layer.tolist() for each in own.micro_batches for layer in each.budgets_LS]


def main(kind: str, path: str, output: str, *data_prefix: str) -> None:
    block = module_at(kind, path)
    dist.init_process_group("gloo")
    loop = Trainer(block, Path(output), *data_prefix) if kind == "trainer" else Host(block)
    result: dict[str, Any] = loop.results()
    result["loaded"] = sorted(name for name in sys.modules if name.startswith("megatron.training"))
    file = Path(output, f"world{dist.get_world_size()}-rank{dist.get_rank()}.json")
    file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
