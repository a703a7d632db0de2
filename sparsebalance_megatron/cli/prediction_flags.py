# SPDX-License-Identifier: Apache-2.0
"""Flags that ``plan``, ``simulate`` and ``advise`` have in common, and the jobs they describe."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sparsebalance_megatron.config import (
    DEFAULT_COUNTED_DEVICE,
    DEFAULT_SELECTION,
    RANGES,
    CountedDevice,
    SparseBalanceConfig,
    check_range,
)
from sparsebalance_megatron.cost.experts import ExpertShape
from sparsebalance_megatron.cost.fit import measured_cost_model
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.rates import (
    DEFAULT_EFFICIENCY,
    DEVICES,
    OF_BLOCK_LISTS,
    Efficiency,
    selection_efficiency,
)
from sparsebalance_megatron.cost.table import CostTable
from sparsebalance_megatron.layer_budgets import base_budgets
from sparsebalance_megatron.plan.job import check_cp_sizes, whole_parts
from sparsebalance_megatron.predict.layouts import Choice
from sparsebalance_megatron.predict.lengths import (
    GENERATORS,
    MAX_TOKENS,
    WorkloadError,
    batches_of,
    read_lengths,
    split_overlong,
)
from sparsebalance_megatron.predict.models import MODELS, ModelPreset, model_named
from sparsebalance_megatron.predict.outcome import Watch
from sparsebalance_megatron.predict.scenario import Recompute, Scenario

STEPS = 20
"""Global batches that every prediction plans by default."""

EVERY_PREDICTION = "every prediction"
"""Title of the flags that the commands share."""

_MEGATRON_SEED = 1234
"""Megatron's ``--seed``."""

_LEAST_BLOCK_TOKENS = 16
"""Kernels multiply no smaller tiles."""

_EXPERT_FLAGS = {
    "--num-experts": "experts",
    "--moe-router-topk": "top_k",
    "--moe-ffn-hidden-size": "ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "shared_ffn_hidden_size",
}
"""Megatron's flag -> the field of :class:`.ExpertShape`."""

_MOST = {
    **dict.fromkeys(("dp", "gpus", "micro_batches", "global_batch", "ep"), 10**6),
    **dict.fromkeys(("pp", "tp", "layers", "steps", "max_segments"), 10**4),
    **dict.fromkeys(("context_parallel_size", "context_parallel_sizes"), 10**6),
    **dict.fromkeys(("num_experts", "moe_router_topk"), 10**6),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 10**7),
    **dict.fromkeys(("seq_length", "max_tokens_per_micro_batch"), 2**30),
    **dict.fromkeys(
        ("dense_efficiency", "sparse_efficiency", "linear_efficiency", "expert_efficiency"), 1
    ),
    "gpu_memory": 10**6,
}
"""Flag, as an attribute -> its largest value; the least is 1, or 0.001 for a fraction."""


def add_prediction_flags(command: ArgumentParser, *, lengths_required: bool = True) -> None:
    """Add the flags that all predictions have."""
    parser = command.add_argument_group(EVERY_PREDICTION)
    lengths = parser.add_mutually_exclusive_group(required=lengths_required)
    lengths.add_argument("--lengths", type=Path, metavar="FILE", help="JSON list, or one per line")
    lengths.add_argument(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="a prefix of .idx files, or a blend as Megatron reads it: its samples in their order; "
        "no .bin is opened",
    )
    lengths.add_argument(
        "--lengths-from", choices=tuple(GENERATORS), help="generated lengths like a data set's"
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="TOKENS", help="longer samples are split; default: none"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="shuffle --lengths first (default: as filed), of --data-path (default: 1234), of "
        "generated lengths (default: 0)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"a config.json of Hugging Face, a directory with one, or one of {', '.join(MODELS)}",
    )
    parser.add_argument("--cost-table", type=Path, help="written by `sparse-balance profile`")
    parser.add_argument("--layers", type=int, help="needed with --cost-table and no --model")
    for flag in _EXPERT_FLAGS:
        parser.add_argument(flag, type=int, help="in place of the model's")
    parser.add_argument(
        "--recompute", choices=get_args(Recompute), default="none", help="in backward"
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="all data-parallel ranks share parameters"
    )
    _add_planning_flags(parser)
    _add_rate_flags(parser)
    parser.add_argument("--steps", type=int, default=STEPS, help="global batches to plan")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def _add_planning_flags(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--selection",
        metavar="NAME",
        help=f"who selects blocks, where operations are counted; default: {DEFAULT_SELECTION}",
    )
    parser.add_argument(
        "--layer-budgets",
        nargs="+",
        metavar="BUDGET:LAYERS",
        help="layers with base budgets of their own, or dense: such as dense:0-1,33-35 16:2-32",
    )
    parser.add_argument(
        "--coverage-threshold",
        type=float,
        default=SparseBalanceConfig.coverage_threshold,
        metavar="P",
        help="coverage that a sample may lose",
    )
    parser.add_argument(
        "--max-tokens-per-micro-batch",
        type=int,
        metavar="TOKENS",
        help="on one rank; default: average samples of a micro-batch x the longest sample, over "
        "the context-parallel size",
    )
    parser.add_argument(
        "--max-context-parallel",
        type=int,
        metavar="W",
        help="ranks that may share a sample where that is planned; default: 8 at most with "
        "context parallelism, else 1",
    )


def _add_rate_flags(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--counted-device",
        choices=get_args(CountedDevice),
        help="at whose rates operations are counted without a cost table, and whose memory a job "
        f"must fit; default: {DEFAULT_COUNTED_DEVICE}",
    )
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="of one GPU; default: the device's"
    )
    sparse = f"{DEFAULT_EFFICIENCY.sparse}, of selections by block {OF_BLOCK_LISTS.sparse}"
    for name, text, default in (
        ("dense", "dense attention", DEFAULT_EFFICIENCY.dense),
        ("sparse", "sparse attention and its router", sparse),
        ("linear", "projections, dense MLPs and the head", DEFAULT_EFFICIENCY.linear),
        ("expert", "products of routed experts", DEFAULT_EFFICIENCY.experts),
    ):
        parser.add_argument(
            f"--{name}-efficiency",
            type=float,
            metavar="SHARE",
            help=f"share of the device's peak in {text}; default: {default}",
        )
    parser.add_argument(
        "--gigabytes-per-second",
        type=float,
        metavar="X",
        help="what a rank receives keys, values and tokens of experts with; default: as measured, "
        "or 50 (150 for tokens inside a node)",
    )


def add_layout_flags(parser: _ActionsContainer, *, required: bool) -> None:
    """Add the flags of one layout, which ``plan`` needs and setups have."""
    for flag, is_required, text in (
        ("--dp", required, "data-parallel x context-parallel ranks"),
        ("--pp", required, "pipeline stages"),
        ("--tp", False, "tensor-parallel ranks; default: 1, or the table's"),
        ("--micro-batches", required, "per rank and step, where ranks share none"),
        ("--global-batch", False, "samples; default: dp x micro-batches"),
        ("--block-size", False, "tokens; default: 256, or the table's"),
    ):
        parser.add_argument(flag, type=int, required=is_required, help=text)
    add_group_flags(parser)
    parser.add_argument(
        "--base-budget",
        type=int,
        default=SparseBalanceConfig.base_budget,
        metavar="BLOCKS",
        help="budget before tuning",
    )


def add_segment_flags(parser: _ActionsContainer) -> None:
    """Add the flags of segments, which ``plan`` and ``simulate`` have."""
    parser.add_argument(
        "--max-segments",
        type=int,
        default=1,
        metavar="N",
        help="segments in which a micro-batch may pass the pipeline; above 1 adds a row",
    )
    parser.add_argument(
        "--segment-tokens",
        type=int,
        default=SparseBalanceConfig.segment_tokens,
        metavar="T",
        help="least tokens of a segment",
    )


def add_group_flags(parser: _ActionsContainer) -> None:
    """Add the flags of ranks that work together on samples or experts."""
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument(
        "--cp",
        "--context-parallel-size",
        dest="context_parallel_size",
        type=int,
        default=1,
        metavar="C",
        help="ranks that share every sample, of the same ranks; adds rows",
    )


def check_flags(arguments: Namespace) -> None:
    """Refuse numbers that no job has.

    Raises:
        ConfigError, WorkloadError: naming the flag, its value and its range.
    """
    for name, value in vars(arguments).items():
        if value is None or name == "max_context_parallel" or isinstance(value, bool):
            continue
        flag = f"--{name.replace('_', '-')}"
        field = "block_size" if name == "block_sizes" else name.removesuffix("s")
        for number in value if isinstance(value, list) else [value]:
            if field in RANGES or name in RANGES:
                check_range(name if name in RANGES else field, number, flag)
            if field == "block_size" and number < _LEAST_BLOCK_TOKENS:
                raise WorkloadError(f"{flag} {number}: must be at least {_LEAST_BLOCK_TOKENS}")
            most = _MOST.get(name)
            least = 1e-3 if isinstance(number, float) else 1
            if most is not None and not least <= number <= most:
                raise WorkloadError(f"{flag} {number}: must be {least:g} to {most}")
    if arguments.cost_table is not None:
        for name in ("counted_device", "selection", *_efficiencies(arguments)):
            if getattr(arguments, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise WorkloadError(f"{flag}: a cost table is measured; drop one of the two")
    elif arguments.model is None and getattr(arguments, "setup", None) is None:
        raise WorkloadError("--model is missing: give one, or --cost-table and --layers")
    if arguments.counted_device is None:
        arguments.counted_device = DEFAULT_COUNTED_DEVICE
    if arguments.selection is None:
        arguments.selection = DEFAULT_SELECTION
    if arguments.gpu_memory is None:
        arguments.gpu_memory = DEVICES[arguments.counted_device].memory_gib
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        raise WorkloadError(f"--seed {arguments.seed}: must be at least 0 and below 2**63")


def _efficiencies(arguments: Namespace) -> list[str]:
    return [name for name in vars(arguments) if name.endswith("_efficiency")]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Lengths in tokens in the order in which steps take them; the longest that may come; how they
    are ordered; where they come from."""

    lengths: np.ndarray
    longest: int
    order: str
    place: object

    def batches(self, size: int, steps: int) -> tuple[tuple[int, ...], ...]:
        """Global batches in order.

        Raises:
            WorkloadError: there is not one.
        """
        return batches_of(self.lengths, size, steps, self.place)


def samples_of(arguments: Namespace, samples: int, generator: str | None = None) -> Samples:
    """The samples of ``--lengths``, ``--data-path`` or ``--lengths-from``.

    Args:
        samples: that steps take.
        generator: of a setup, where no flag names lengths.

    Raises:
        DataError, WorkloadError: a file or the blend cannot be read.
    """
    generator = arguments.lengths_from or generator
    limit, seed = arguments.seq_length, arguments.seed
    if arguments.data_path is not None:
        from sparsebalance_megatron.data.blend import parse_blend
        from sparsebalance_megatron.data.samples import index_lengths

        seed = _MEGATRON_SEED if seed is None else seed
        index = index_lengths(
            parse_blend(arguments.data_path, "--data-path"), max_tokens=limit, seed=seed
        )
        lengths = index.lengths_of(index.global_batch(0, samples))
        longest = limit or int(index.lengths_of(np.arange(len(index))).max())
        order, place = f"of training with seed {seed}", " ".join(arguments.data_path)
        return Samples(lengths=lengths, longest=longest, order=order, place=place)
    if arguments.lengths is not None:
        lengths, place, order = read_lengths(arguments.lengths), arguments.lengths, "as filed"
        longest = int(lengths.max())
        if seed is not None:
            lengths = np.random.default_rng(seed).permutation(lengths)
            order = f"shuffled with seed {seed}"
    else:
        assert generator is not None, "a required group of flags, or a setup"
        lengths, place = GENERATORS[generator](samples, seed or 0), generator
        longest, order = MAX_TOKENS, f"generated with seed {seed or 0}"
    if limit is not None:
        lengths, longest = split_overlong(lengths, limit), limit
    return Samples(lengths=lengths, longest=longest, order=order, place=place)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A model, and the measurements of its parts where there are any."""

    model: ModelPreset
    table: CostTable | None
    bandwidth: float | None

    @property
    def block_size(self) -> int:
        """Block size of the table, or the default."""
        table = self.table
        return table.identity.block_size if table else SparseBalanceConfig.block_size

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that the table was measured for, or 1."""
        return self.table.identity.shape.tensor_parallel_size if self.table else 1

    def measured(self, tensor_parallel_size: int, block_size: int) -> CostModel | None:
        """Costs of the table for so many ranks and such blocks; None without one.

        Raises:
            CostTableError: it was measured for something else.
        """
        if self.table is None:
            return None
        run: dict[str, Any] = self.model.shape.flat()
        # Megatron pads the vocabulary, and by how much is not known here.
        del run["shape.vocab_size"]
        run |= {"shape.tensor_parallel_size": tensor_parallel_size, "block_size": block_size}
        assert self.table.path is not None
        return measured_cost_model(self.table.path, run).with_bandwidth(self.bandwidth)


def costs_of(arguments: Namespace, default_model: str | None = None) -> Costs:
    """The model of ``--model`` or of the cost table, with the experts of its flags.

    Raises:
        CostTableError: the table cannot be read.
        WorkloadError: there is no such model, or the number of layers is missing.
    """
    name = arguments.model or default_model
    if name is None and arguments.layers is None:
        raise WorkloadError(
            f"--cost-table {arguments.cost_table}: costs are per layer; add --layers or --model"
        )
    table = None if arguments.cost_table is None else CostTable.load(arguments.cost_table)
    if name is not None:
        model = model_named(name)
    else:
        assert table is not None
        shape = replace(table.identity.shape, tensor_parallel_size=1)
        model = ModelPreset(
            name=str(arguments.cost_table),
            layers=arguments.layers,
            shape=shape,
            tied_embeddings=False,
        )
    layers = arguments.layers or model.layers
    experts = _experts(arguments, model.shape.experts)
    model = replace(model, layers=layers, shape=replace(model.shape, experts=experts))
    return Costs(model=model, table=table, bandwidth=arguments.gigabytes_per_second)


def _experts(arguments: Namespace, experts: ExpertShape | None) -> ExpertShape | None:
    """Experts of the model, with sizes that flags name in place of its own."""
    given = {
        field: value
        for flag, field in _EXPERT_FLAGS.items()
        if (value := getattr(arguments, flag[2:].replace("-", "_"))) is not None
    }
    if not given:
        return experts
    if experts is None and (missing := {"experts", "top_k", "ffn_hidden_size"} - given.keys()):
        of_field = {field: flag for flag, field in _EXPERT_FLAGS.items()}
        first = next(iter(given))
        raise WorkloadError(
            f"{of_field[first]} {given[first]}: the model has no experts of its own; add "
            f"{', '.join(of_field[field] for field in sorted(missing))}"
        )
    return ExpertShape(**given) if experts is None else replace(experts, **given)


def scenario_of(
    arguments: Namespace,
    costs: Costs,
    samples: Samples,
    choice: Choice,
    *,
    ranks: int,
    global_batch: int,
    **settings: Any,
) -> Scenario:
    """The job of some layout; a cost table's ranks and block size come before those of the choice.

    Args:
        settings: further fields of :class:`.SparseBalanceConfig`.

    Raises:
        ConfigError: samples or ranks cannot be divided in this way.
        CostTableError: the table was measured for something else.
    """
    cp_size, positions = choice.context_parallel_size, choice.micro_batches
    measured = costs.measured(choice.tensor_parallel_size, choice.block_size)
    check_cp_sizes(ranks, cp_size, cp_size)
    sizes = {"--micro-batches": positions, "data-parallel ranks": ranks // cp_size}
    per_micro_batch = whole_parts(global_batch, "--global-batch", sizes)
    cap = -(-per_micro_batch * samples.longest // cp_size)
    config = SparseBalanceConfig(
        block_size=choice.block_size,
        base_budget=choice.base_budget,
        layer_budgets=layer_budgets_of(arguments, costs.model.layers),
        coverage_threshold=arguments.coverage_threshold,
        selection=arguments.selection,
        counted_device=arguments.counted_device,
        gigabytes_per_second=arguments.gigabytes_per_second,
        **settings,
    )
    return Scenario(
        model=costs.model,
        ranks=ranks,
        stages=choice.pipeline_stages,
        micro_batches=positions,
        cap_tokens=arguments.max_tokens_per_micro_batch or cap,
        longest_tokens=samples.longest,
        config=config,
        tensor_parallel_size=choice.tensor_parallel_size,
        context_parallel_size=cp_size,
        expert_parallel_size=choice.expert_parallel_size,
        max_context_parallel=arguments.max_context_parallel,
        sharded_parameters=arguments.fsdp,
        recompute=arguments.recompute,
        efficiency=efficiency_of(arguments),
        measured=measured,
    )


def efficiency_of(arguments: Namespace) -> Efficiency:
    """The rates of the flags."""
    fields = {"dense": "dense", "sparse": "sparse", "linear": "linear", "expert": "experts"}
    given = {field: getattr(arguments, f"{name}_efficiency") for name, field in fields.items()}
    return replace(
        selection_efficiency(arguments.selection),
        **{field: value for field, value in given.items() if value is not None},
    )


def layer_budgets_of(arguments: Namespace, layers: int) -> str | None:
    """The text of ``--layer-budgets``; None where it is not given.

    Raises:
        ConfigError: it cannot be read, or names a layer that a model of ``layers`` does not have.
    """
    if arguments.layer_budgets is None:
        return None
    text = " ".join(arguments.layer_budgets)
    base_budgets(1, text, layers, "--layer-budgets")
    return text


def progress_bar(name: str) -> Callable[[int], Watch]:
    """A bar over planned steps, which appears on terminals after three seconds."""

    from tqdm import tqdm

    def start(steps: int) -> Watch:
        bar = tqdm(total=steps, desc=name, unit="step", disable=None, delay=3, leave=False)

        def watch() -> None:
            bar.update()
            if bar.n >= steps:
                bar.close()

        return watch

    return start
