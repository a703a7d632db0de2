# SPDX-License-Identifier: Apache-2.0
"""A run on an index of samples.

Trainers that call Megatron's schedules themselves begin one, and :mod:`.training_hooks` puts one
into ``megatron.training``, which is not loaded here.
"""

from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import check_dense_length, dense_length_line
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.errors import DataError, PlanError
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import BatchSizes, Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.log.files import LogDirectory
from sparsebalance_megatron.megatron.compat import enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import (
    replace_core_attention,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.kernel_check import KernelCheckError, check_kernels
from sparsebalance_megatron.megatron.planned_schedule import ForwardBackward, as_planned
from sparsebalance_megatron.megatron.sequence_groups import (
    data_parallel_group,
    make_sequence_groups,
)
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.unsupported import DATA_FLAGS
from sparsebalance_megatron.plan.pipeline.orders import Schedule
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.agreement import (
    check_ranks_agree,
    gather_or_raise,
    print_rank_0,
    take_over,
)
from sparsebalance_megatron.run.forward_step import ForwardStep
from sparsebalance_megatron.run.inputs import (
    Inputs,
    attention_options,
    checked_config,
    fingerprint,
    read_inputs,
)
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator, SequencePacking
from sparsebalance_megatron.run.run import IntegrationError, Run
from sparsebalance_megatron.run.sinks import StepSinks, prepare_log_directory


class TrainerRun:
    """One run on one rank, on samples of an index; :func:`begin_run` makes it for a trainer that
    owns its loop.

    Args:
        inputs: what could be checked before process groups exist.
        transformer_config: the model's; None where :meth:`layer_spec` is not called.
        ends_steps: whether the loop is Megatron's, which runs steps as planned and ends them;
            otherwise the trainer calls :meth:`end_step`.

    ``keep_state`` is given :meth:`state_dict` when a step has been learnt from; ``make_scheduler``
    gives what plans the run; ``all_stages_read`` has chunks read tokens that need none.
    """

    def __init__(
        self,
        inputs: Inputs,
        device: torch.device,
        transformer_config: Any = None,
        *,
        ends_steps: bool = False,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.scheduler: Scheduler
        self.all_stages_read = False
        self.keep_state: Callable[[Callable[[], dict[str, Any]]], None] = lambda state_dict: None
        self.make_scheduler: Callable[[Inputs], Scheduler] = Inputs.scheduler
        self.options = attention_options(inputs.plan_settings, inputs.grid, inputs.cost)
        self._transformer_config = transformer_config
        self._ends_steps = self._runs_as_planned = ends_steps
        self._run: Run | None = None
        self._packing: SequencePacking
        self._record: dict[str, str] = {}
        self._loaded_state: dict[str, Any] | None = None
        self._log_directory: LogDirectory | None = None

    @property
    def run(self) -> Run:
        """The steps' own run; raises :class:`StateError` if it has not been started."""
        if self._run is None:
            raise StateError("the run has not started: ask for the training iterator first")
        return self._run

    @property
    def micro_batches(self) -> int:
        """``num_microbatches`` of training steps; the schedule of :meth:`wrap_schedule` runs as
        many as each step's plan has."""
        return self.inputs.job.micro_batches

    def layer_spec(self, spec: Any = None, *, vp_stage: int | None = None) -> Any:
        """Give the decoder's layer spec with core attention replaced, for ``GPTModel``; see
        :func:`.replace_core_attention`. ``spec``: None is what Megatron chooses for the model."""
        if spec is None:
            return sparse_balance_layer_spec(self.options)(self._transformer_config, vp_stage)
        return replace_core_attention(spec, self.options)

    def wrap_forward_step(self, forward_step: Callable[..., Any]) -> "ForwardStep":
        """Make a forward step of planned, measured micro-batches around the trainer's own.

        Args:
            forward_step: ``(data_iterator, model) -> (output, loss_func)``. Its iterator yields one
                :data:`.forward_step.Batch`; ``loss_func(output)`` returns (sum of token losses,
                number of tokens, report).

        Returns:
            The ``forward_step_func`` of training steps. Evaluate with the trainer's own.
        """
        return ForwardStep(forward_step, self)

    def wrap_schedule(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Make a schedule that runs steps as planned: with segments, or in fewer micro-batches.

        Call it before :meth:`train_data_iterator`, with the function that Megatron's
        ``get_forward_backward_func`` gives. Without it every step has :attr:`micro_batches`.
        """
        self._runs_as_planned = True
        return as_planned(forward_backward, segments=self.inputs.config.max_segments > 1)

    def start(self, *, consumed_samples: int, iteration: int | None = None) -> None:
        """Start the run, unless it has started; collective, errors alike on all ranks.

        Args:
            consumed_samples: trained on before; a step must begin there.
            iteration: steps trained before, as the trainer counts them, perhaps of another size;
                None for a trainer that does not say.

        Raises:
            IntegrationError: if loaded state goes on from another sample, or steps may have
                segments, or an order of their own, and no schedule was wrapped.
            StateError: if no step begins there, or loaded state cannot be continued in this run.
        """
        saved = self._loaded_state or {}
        if not self._runs_as_planned:
            max_segments = self.inputs.config.max_segments
            if max_segments > 1 or self.inputs.job.order is not None:
                raise IntegrationError(
                    f"{flag_name('max_segments')} {max_segments}, or an order: Megatron's schedule "
                    "runs neither; call wrap_schedule before train_data_iterator"
                )
            # Such a loop runs the job's number of micro-batches in every step.
            fixed = self.inputs.plan_settings.of_all_positions
            self.inputs = replace(self.inputs, plan_settings=fixed)
        if not self._ends_steps and saved.get("consumed_samples") not in (None, consumed_samples):
            raise IntegrationError(
                f"consumed_samples {consumed_samples}: the loaded state goes on after "
                f"{saved['consumed_samples']} samples; give the number that was saved with it"
            )
        settings = self.inputs.settings
        steps = settings.batch_sizes.step_at(consumed_samples)
        settings.check_batch_sizes(steps)
        if self._run is None:
            if iteration is None:
                iteration = saved.get("iteration", steps)
            extra_steps = iteration - steps
            self.inputs = self.inputs.from_step(steps, saved.get("window"), extra_steps)
            self._run = self._started(resumed=consumed_samples > 0, extra_steps=extra_steps)

    def _started(self, *, resumed: bool, extra_steps: int) -> Run:
        inputs = self.inputs
        self._record = fingerprint(inputs)
        check_ranks_agree(self._record)
        settings = inputs.settings
        job = settings.host_job
        what = inputs.config, job.shape, settings.dtype, self.device
        packed = job.takes_packed_sequences and self.device.type == "cuda"
        (checked, *_) = gather_or_raise(
            lambda: check_kernels(*what, takes_packed_sequences=packed), KernelCheckError
        )
        print_rank_0(checked)
        if inputs.config.log_dir is not None:
            directory = inputs.config.log_dir
            self._log_directory = prepare_log_directory(directory, keep_in_place=resumed)
        scheduler = self.make_scheduler(inputs)
        if self._loaded_state is not None:
            take_over(self._loaded_state, scheduler, self._record)
        elif resumed:
            print_rank_0(
                "the checkpoint has no plugin state; coverage curves and cost corrections start "
                "afresh"
            )
        print_rank_0(*inputs.train.describe())
        first = torch.distributed.get_rank() == 0
        (untrained, *_) = gather_or_raise(lambda: inputs.untrained() if first else (), DataError)
        (uneven, *_) = gather_or_raise(lambda: inputs.uneven_stages() if first else (), PlanError)
        dense = dense_length_line(inputs.config, inputs.cost, settings.seq_length)
        windows = inputs.window_lines(extra_steps) if first else ()
        print_rank_0(dense, *inputs.layer_lines, *untrained, *uneven, *windows)
        self._packing = packing = SequencePacking(
            block_size=inputs.config.block_size,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            groups=make_sequence_groups(
                inputs.plan_settings.max_cp_size,
                heads=inputs.cost.exchange,
                timeout_minutes=settings.distributed_timeout_minutes,
            ),
        )
        self.scheduler = scheduler
        run = Run(
            inputs.job,
            scheduler.planner.coverage,
            self._learn,
            self.device,
            ends_steps=self._ends_steps,
            extra_steps=extra_steps,
            agreement=packing.agreement,
            leaves_attention=self.options.leaves_attention,
            token_counts=self._token_counts,
        )
        run.sinks = StepSinks(inputs, run.place, self.device)
        return run

    def _learn(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        self.scheduler.finish_step(planned.plan.step, measured)
        self.keep_state(self.state_dict)

    def _token_counts(self, plan: StepPlan) -> dict[str, int]:
        """Tokens that a step's plan pads, over all ranks, and those that the data set lost."""
        counts = self.inputs.train.counts
        return {
            "padded-tokens": sum(map(self._packing.padded_tokens, plan.micro_batches)),
            "truncated-tokens": counts.truncated_tokens,
            "dropped-tokens": counts.dropped_tokens,
        }

    def train_data_iterator(
        self, *, consumed_samples: int = 0, vp_stage: int | None = None
    ) -> MicroBatchIterator:
        """Give one model chunk's ``data_iterator`` of training steps; the first call is collective.

        It is endless: after the last sample of an epoch comes the first of the next.

        Args:
            consumed_samples: see :meth:`start`.
            vp_stage: model chunk, with virtual pipeline stages.

        Raises:
            IntegrationError, StateError: see :meth:`start`.
        """
        self.start(consumed_samples=consumed_samples)
        index = self.inputs.train
        return self._iterator(self.scheduler, index, consumed_samples, vp_stage, training=True)

    def evaluation_data_iterator(
        self, index: SampleIndex, consumed_samples: int = 0, vp_stage: int | None = None
    ) -> MicroBatchIterator:
        """Micro-batches of validation or test samples, at base budgets; the last step that has
        begun begins anew."""
        batch_size = self.inputs.settings.evaluation_batch_size
        scheduler = self.inputs.evaluation_scheduler(index, self.scheduler)
        begun = consumed_samples // batch_size * batch_size
        return self._iterator(scheduler, index, begun, vp_stage, training=False)

    def _iterator(
        self,
        scheduler: Scheduler,
        index: SampleIndex,
        consumed_samples: int,
        vp_stage: int | None,
        *,
        training: bool,
    ) -> MicroBatchIterator:
        job, chunk, place = self.inputs.job, vp_stage or 0, self.run.place
        last = job.pipeline_stages - 1, job.virtual_stages - 1
        reads = self.all_stages_read or (place.pipeline_rank, chunk) in ((0, 0), last)
        return MicroBatchIterator(
            scheduler,
            index if reads else None,
            self._packing,
            device=self.device,
            data_parallel_rank=place.data_parallel_rank,
            chunk=chunk,
            training=training,
            step=scheduler.batch_sizes.step_at(consumed_samples),
            worker=ThreadPoolExecutor(1, "sparse-balance-read"),
        )

    def end_step(self) -> dict[str, float]:
        """Learn from a training step; collective: once a step, on every rank, after the schedule.

        Returns:
            The step's figures, for the trainer's own log: name -> value, alike on all ranks.

        Raises:
            IntegrationError: on all ranks alike, if one has run no whole step, or its model was not
                given the plugin's ``packed_seq_params``.
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        return self.run.end_whole_step()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint besides the number of consumed samples; plain Python types, alike
        on all ranks."""
        if self._run is not None:
            state = self.scheduler.state_dict()
            steps = self.scheduler.batch_sizes.step_at(state["consumed_samples"])
            state |= {"run": self._record, "iteration": steps + self._run.extra_steps}
            dealt = self.inputs.dealt
            return state if dealt is None else state | dealt.state(steps)
        if self._loaded_state is None:
            raise StateError("nothing to save: the training iterator has not been asked for yet")
        return self._loaded_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a :meth:`state_dict`, before :meth:`train_data_iterator` makes the first
        plan."""
        if self._run is not None:
            raise IntegrationError("load_state_dict: call it before train_data_iterator")
        self._loaded_state = state
        self.inputs = self.inputs.with_kept_dense_length(state)
        self.options.config = self.inputs.config


def begin_run(
    config: SparseBalanceConfig,
    transformer_config: Any,
    *,
    vocab_size: int,
    data_prefix: str,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    split: str = "100,0,0",
    seed: int = 1234,
    device: torch.device | None = None,
    warm_up_samples: int = 0,
    order: Schedule | None = None,
) -> TrainerRun:
    """Begin a run in a trainer that owns its loop; on every rank, once Megatron's groups exist.

    Args:
        config: the plugin's choices; ``enabled`` is taken for granted.
        transformer_config: the model's, before the model is built. Its pipeline stages will
            exchange sequences of any length: ``variable_seq_lengths`` is set.
        vocab_size: rows of the embedding, padding included.
        data_prefix: names a pair of .bin and .idx files, whose documents are the samples.
        seq_length: tokens of the longest sample.
        micro_batch_size: samples that a micro-batch holds on average.
        global_batch_size: samples of a training step.
        split: weights of training, validation and test documents; the first are trained on.
        seed: of the order of samples.
        device: where the model runs; None is the current CUDA device.
        warm_up_samples: trained on while the learning rate rises: no window begins before.
        order: of the pipeline's operations; see :class:`.Job`.

    Returns:
        The run, whose methods a trainer calls in this order: ``layer_spec``, ``load_state_dict``,
        ``wrap_schedule``, ``wrap_forward_step``, ``train_data_iterator``; after each step
        ``end_step``.

    Raises:
        ConfigError, DataError, CostTableError: naming the field or file and the remedy.
    """
    device = device or torch.device(torch.cuda.current_device())
    config = checked_config(config, transformer_config, device, longest_tokens=seq_length)
    check_dense_length(config, seq_length)
    settings = RunSettings.from_transformer_config(
        transformer_config,
        vocab_size=vocab_size,
        data_parallel_size=data_parallel_group().size(),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        batch_sizes=BatchSizes.constant(global_batch_size),
        data_flags=Namespace(**dict.fromkeys(DATA_FLAGS) | {"data_path": [data_prefix]}),
        split=split,
        seed=seed,
        evaluation_batch_size=global_batch_size,
        evaluation_micro_batch_size=micro_batch_size,
        warm_up_samples=warm_up_samples,
        order=order,
    )
    inputs = read_inputs(settings, config, device.type)
    enable_variable_lengths(transformer_config)
    return TrainerRun(inputs, device, transformer_config)
