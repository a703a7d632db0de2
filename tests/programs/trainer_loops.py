# SPDX-License-Identifier: Apache-2.0
"""Trains with examples/hosts/own_loop.py and own_data.py.

What one run can judge is judged here; what is compared with another run goes to a JSON file.

Usage: trainer_loops.py trainer CODE.py OUTPUT_DIRECTORY DATA_PREFIX, or host CODE.py
OUTPUT_DIRECTORY FULLY_SHARD.py. CODE.py is one of these examples. ``trainer`` owns its loop: one
rank trains without the plugin, to compare with, and makes mistakes; two train data-parallel and
then as a pipeline. ``host`` owns its data as well: two ranks run their micro-batches alone and make
mistakes, four share them; one rank is what both are compared with. One rank and two also train
examples/hosts/fully_shard.py on the host's samples.
"""

import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
    STEPS,
    Losses,
    balance_config,
    batches,
    check_told,
    gpt,
    lengths_of,
    module_at,
    pipeline,
    schedule,
    thd_params,
    transformer_config,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "extending"))

from gpipe import gpipe  # noqa: E402

from sparsebalance_megatron import integration  # noqa: E402
from sparsebalance_megatron.attention.select import selector_named  # noqa: E402
from sparsebalance_megatron.data.packing import pack  # noqa: E402
from sparsebalance_megatron.data.samples import open_samples, parse_blend  # noqa: E402
from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention  # noqa: E402

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
FEW_ROUNDINGS = 8 * 2.0**-23
"""Placements and layouts differ in the order of float32 sums only."""
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
        assert resumed.values == tuned.values
        return {"dense": dense.values, "tuned": tuned.values, "figures": tuned.figures}

    def all_forwards_first(self) -> list[float]:
        """Two stages in the order of examples/extending/gpipe.py, whose plans are simulated so."""
        losses = Losses()
        with pipeline(2):
            sizes = self.data | {"order": gpipe}
            fields, config = (
                transformer_config(2),
                balance_config(log_dir=str(self.directory / "gpipe"), **DENSE),
            )
            self.block.train(fields, config, sizes, STEPS, losses)
        return losses.values

    def before_the_schedule_is_wrapped(self) -> None:
        """As many micro-batches as the batch sizes make, and no segments."""
        with pipeline(1, expert_model_parallel_size=2):
            run = self.begin(EXPERTS, **DENSE)
            number = run.train_data_iterator().next_step().micro_batches
            assert number == run.micro_batches == 4
        with pipeline(2):
            run = self.begin({"pipeline_model_parallel_size": 2}, max_segments=4, segment_tokens=16)
            told = "call wrap_schedule before train_data_iterator"
            check_told({told: run.train_data_iterator})
            run = self.begin({"pipeline_model_parallel_size": 2}, {"order": gpipe})
            check_told({told: run.train_data_iterator})

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
        blend = parse_blend([self.data["data_prefix"]], "--data-path")
        index = open_samples(
            blend, "train", max_tokens=SIZES["seq_length"], overlong="split", seed=1234
        )
        config = transformer_config()
        model = gpt(config, get_gpt_layer_local_spec(normalization="RMSNorm"))
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
        losses, batch_size = [], SIZES["global_batch_size"]
        for step in range(STEPS):
            samples = map(index.read, index.global_batch(step * batch_size, batch_size).tolist())
            rows = [pack([sample], [0, sample.length_tokens]) for sample in samples]
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

    def bare(self) -> None:
        """Two steps of the bare trainer, then everything that a loop can do wrong."""
        loop = BareTrainer(self, str(self.directory / "bare"))
        for _ in range(2):
            loop.evaluate()
            loop.schedule()
            loop.evaluate()
            loop.run.end_step()
        run, begin = loop.run, self.begin

        def resume(consumed_samples: int, **data: Any) -> None:
            other = begin(data=data)
            other.load_state_dict(run.state_dict())
            other.train_data_iterator(consumed_samples=consumed_samples)

        twice, half = (f"end_step after {steps} forward steps, expected 8" for steps in (0, 4))
        check_told(
            {
                f"IntegrationError: {twice}": run.end_step,
                f"IntegrationError: {half}": BareTrainer(self).half_a_step,
                "end_step was not called for step 0": BareTrainer(self).never_ended,
                "8 of 8 forward steps never reached": BareTrainer(self).without_budgets,
                "the loss function returned 2 values": BareTrainer(self).two_values,
                "consumed 3 samples, no multiple": lambda: run.train_data_iterator(
                    consumed_samples=3
                ),
                "StateError: nothing to save": lambda: begin().state_dict(),
                "consumed_samples 8: the loaded state goes on after 16": lambda: resume(8),
                "--data-path: the training samples are not": lambda: resume(16, split="80,20,0"),
                "call it before train_data_iterator": lambda: run.load_state_dict(run.state_dict()),
            }
        )
        other_loop = "not for a trainer with its own loop"
        refused: dict[str, dict[str, Any]] = {
            "--sparse-balance with --attention-dropout 0.1": {"model": {"attention_dropout": 0.1}},
            "needs --calculate-per-token-loss": {"model": {"calculate_per_token_loss": False}},
            "max-segments 2 with --pipeline-model-par": {"max_segments": 2},
            f"--sparse-balance-dry-run 0: {other_loop}": {"dry_run": 0},
            f"--sparse-balance-eval-attention dense: {other_loop}": {"eval_attention": "dense"},
            f"--sparse-balance-device cuda: {other_loop}": {"device": "cuda"},
            "/no/data.idx: no such file": {"data": {"data_prefix": "/no/data"}},
            "must be a multiple of --micro-batch-size 3": {"data": {"micro_batch_size": 3}},
        }
        check_told({told: partial(begin, **choices) for told, choices in refused.items()})

    def results(self) -> dict[str, Any]:
        if dist.get_world_size() == 1:
            with pipeline(1):
                self.bare()
                return {"plain": self.plain_losses()}
        self.before_the_schedule_is_wrapped()
        gpiped = {"dense": self.all_forwards_first()}
        return {
            **{"dp2": self.twice(1), "pp2": self.twice(2)},
            **{"gpipe": gpiped, "chunks": self.chunks()},
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

    def layer(module: Any, q_THD: Any, k_TGD: Any, v_TGF: Any, context: Any) -> Any:
        seen.append(context.budgets_LS[module._layer_index].tolist())
        return attend(module, q_THD, k_TGD, v_TGF, context)

    with (
        mock.patch.object(kind, "select", select),
        mock.patch.object(BudgetedCoreAttention, "_attend", layer),
    ):
        yield seen


class Host:
    """The document's host, and the one whose parameters are in shards."""

    def __init__(self, block: Any, fully_shard: str) -> None:
        self.block, self.fully_shard = block, module_at("fully_shard", fully_shard)

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

    @contextmanager
    def planned_steps(self) -> Any:
        """The steps that the host runs meanwhile."""
        steps, run_schedule = [], self.block.run_schedule

        def recorded(*given: Any) -> Any:
            steps.append(given[2])
            return run_schedule(*given)

        with mock.patch.object(self.block, "run_schedule", recorded):
            yield steps

    def shared(self) -> dict[str, Any]:
        """Dense; where a rank holds at most 64 tokens and exchanges are slow, so that cp_sizes
        differ, and in layouts of which each has two groups."""
        capped = {"max_tokens_per_micro_batch": 64, "gigabytes_per_second": 1000.0}
        layouts = {
            "data": (1, 1, {"max_context_parallel": 4, **capped}),
            "pipeline": (2, 1, {"max_context_parallel": 2, "max_tokens_per_micro_batch": 128}),
            "context": (1, 2, {"context_parallel": "static"}),
        }
        result: dict[str, Any] = {}
        for name, (stages, cp_size, choices) in layouts.items():
            losses, context = Losses(), {"context_parallel_size": cp_size}
            with pipeline(stages, context_parallel_size=cp_size):
                with self.planned_steps() as steps:
                    ended, _, model = self.train(
                        losses, stages, batches(), None, context, **DENSE, **FAST | choices
                    )
                cp_sizes = {each.cp_size for step in steps for each in step.plan.micro_batches}
                result[name] = {"losses": losses.values, "cp_sizes": sorted(cp_sizes)}
                if name == "data":
                    result["held"] = self.shared_passes(ended, model)
        return result

    def positions(self) -> None:
        """Experts, in as many micro-batches as the plan chooses and in the least."""
        losses = {name: Losses() for name in ("planned", "fixed")}
        with pipeline(1, expert_model_parallel_size=2):
            for name, of_way in losses.items():
                self.train(of_way, 1, batches(), model=EXPERTS, positions=name, **DENSE)
        check_same_losses(losses["planned"], losses["fixed"])

    def shared_passes(self, ended: Any, model: Any) -> list[dict[str, Any]]:
        """A pass that learns nothing, mistakes, and what a rank is given."""
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
        missing, shared = {"labels": torch.zeros(3)}, "ranks share micro-batches; give None as"
        check_told(
            {
                f"{shared} packed_seq_params": lambda: ended.attach(planned, 0, own, model=model),
                f"{shared} packed_seq_params and the model": lambda: ended.attach(planned, 0),
                "labels has 3 tokens, the samples": lambda: ended.cut(planned, 0, missing),
                ": ranks [1, 2, 3] planned another step than rank 0": other_plans,
            }
        )
        return held

    def own_parameters(self, ended: Any, model: Any) -> None:
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
        cut, own = losses.values
        assert own == cut

    def layouts(self) -> dict[str, Any]:
        """Two data-parallel ranks, then two stages."""
        dense, elsewhere, tuned, resumed, staged = (Losses() for _ in range(5))
        with pipeline(1):
            self.train(dense, 1, batches(2), **DENSE)
            self.train(elsewhere, 1, batches(2), batching="length", **DENSE)
            ended, _, model = self.train(tuned, 1, batches(), **TUNED)
            _, state, _ = self.train(resumed, 1, batches(2), **TUNED)
            self.train(resumed, 1, batches(2, 2), state, **TUNED)
            self.plan_as_placed(ended)
            self.own_parameters(ended, model)
            self.pinned_passes(ended, model)
            self.mistakes(ended, model)
        with pipeline(2):
            self.train(staged, 2, batches(2), **DENSE)
        check_same_losses(elsewhere, dense)
        check_same_losses(staged, dense)
        assert resumed.values == tuned.values
        return {"losses": tuned.values, "figures": tuned.figures}

    def plan_as_placed(self, ended: Any) -> None:
        """Each rank knows its own micro-batches; the plan is that of both."""
        rank = parallel_state.get_data_parallel_rank()
        plan = ended.plan_as_placed([[10 + rank, 20], [30]]).plan
        placed = [(each.rank, each.position, each.lengths_tokens) for each in plan.micro_batches]
        assert placed == [(0, 0, (10, 20)), (0, 1, (30,)), (1, 0, (11, 20)), (1, 1, (30,))]

    def pinned_passes(self, ended: Any, model: Any) -> None:
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
        assert forward == _by_layer(planned)
        assert pinned == _by_layer(update)

    def mistakes(self, ended: Any, model: Any) -> None:
        """Everything that a host can do wrong."""
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

        def never_ended() -> None:
            run_schedule(ended, model, plan([9] * 4), [batch[0][:10]] * 4)

        own, other = "end_step after", "end_step: ranks 1 have a problem of their own to report"
        foreign, unpacked = thd_params(boundaries), PackedSeqParams(qkv_format="sbhd")
        check_told(
            {
                "the sequence's samples have 5": lambda: ended.attach(planned, 0, foreign),
                "PackedSeqParams in the thd layout": lambda: ended.attach(planned, 0, unpacked),
                "micro-batch 99: the plan has": lambda: ended.attach(planned, 99),
                own if rank == 1 else other: half_a_step,
                "PlanMismatchError: ranks 1 executed another plan than rank 0": other_plans,
                "but end_step was not called for step": never_ended,
                "--sparse-balance-log-dir here: not for a trainer with its own loop": (
                    lambda: self.train(Losses(), 1, (), log_dir="here")
                ),
            }
        )

    def sharded(self) -> dict[str, Any]:
        """Losses and figures of fully_shard.py, with dense and with tuned budgets."""
        found = {}
        with pipeline(1):
            for name, choices in {"dense": DENSE, "tuned": TUNED}.items():
                losses, made = Losses(), (transformer_config(), balance_config(**choices))
                self.fully_shard.train(*made, HOST_SIZES, batches(), losses)
                found[name] = {"losses": losses.values, "figures": losses.figures}
        return found

    def results(self) -> dict[str, Any]:
        if dist.get_world_size() == 4:
            return self.shared()
        if dist.get_world_size() == 2:
            self.positions()
            return {"tuned": self.layouts(), "sharded": self.sharded()}
        alone = Losses()
        with pipeline(1):
            self.train(alone, 1, batches(), **DENSE)
        return {"dense": alone.values, "sharded": self.sharded()}


def check_same_losses(found: Losses, expected: Losses) -> None:
    assert len(set(expected.values)) == len(expected.values) > 1
    np.testing.assert_allclose(found.values, expected.values, rtol=FEW_ROUNDINGS)


def _by_layer(planned: Any) -> list[list[int]]:
    own = planned.plan.for_rank(parallel_state.get_data_parallel_rank())
    return [layer.tolist() for each in own.micro_batches for layer in each.budgets_LS]


def main(kind: str, path: str, output: str, other: str) -> None:
    block = module_at(kind, path)
    dist.init_process_group("gloo")
    loop = Trainer(block, Path(output), other) if kind == "trainer" else Host(block, other)
    result = loop.results()
    assert not any(name.startswith("megatron.training") for name in sys.modules)
    file = Path(output, f"world{dist.get_world_size()}-rank{dist.get_rank()}.json")
    file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
