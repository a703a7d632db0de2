# SPDX-License-Identifier: Apache-2.0
"""The one configuration object; every ``--sparse-balance-*`` flag is generated from its fields.

Annotations stay evaluated here: Megatron's flag generator reads them as types.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin

from sparsebalance_megatron.errors import ConfigError as ConfigError
from sparsebalance_megatron.selector_registry import check_name, flag_help

Batching = Literal["arrival", "length", "latency", "makespan"]
Tuning = Literal["off", "anchor", "makespan"]
Anchor = Literal["mean", "min", "max"]
Overlong = Literal["split", "truncate", "drop"]
MissingLossMask = Literal["refuse", "train"]
Device = Literal["auto", "cpu", "cuda"]
Calibration = Literal["measured", "stages", "off"]
EvaluationAttention = Literal["sparse", "dense"]
CoverageTarget = Literal["threshold", "base"]
ContextParallel = Literal["static", "dynamic"]
CoverageMeanOver = Literal["samples", "tokens"]
ExchangeName = Literal["all-gather", "ring", "hierarchical-ring"]
RecomputeAttention = Literal["keep", "again"]
Planning = Literal["ahead", "on-demand"]
AttentionImplementation = Literal["auto", "triton", "blocks", "tokens", "reference"]
Router = Literal["auto", "triton", "torch"]


DEFAULT_SELECTION = "token-query-head"

MAX_BLOCKS = 2**24
"""Of a budget: beyond any document, and far from where 32-bit indices of blocks overflow."""

RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "coverage_slack": (lambda slack: 0.0 <= slack < 1.0, "must lie in [0, 1)"),
    "gigabytes_per_second": (
        lambda bandwidth: 0.0 < bandwidth < float("inf"),
        "must be finite and above 0",
    ),
    "block_size": (
        lambda tokens: 1 <= tokens <= 2**20 and 2**20 % tokens == 0,
        "must be a power of two, from 1 to 1048576 tokens",
    ),
    "base_budget": (
        lambda blocks: 1 <= blocks <= MAX_BLOCKS,
        f"must be at least 1 block (a query's own), at most {MAX_BLOCKS}",
    ),
    "coverage_threshold": (lambda share: 0.0 <= share < 1.0, "must lie in [0, 1)"),
    "coverage_decay": (lambda weight: 0.0 <= weight < 1.0, "must lie in [0, 1)"),
    "plan_ms": (lambda ms: 0.0 <= ms <= 10_000.0, "must be finite, from 0 to 10000 ms"),
    "log_megabytes": (lambda size: 1 <= size <= 10**6, "must be 1 to 1000000 MB"),
    "max_tokens_per_micro_batch": (lambda tokens: tokens >= 1, "must be at least 1 token"),
    "max_context_parallel": (
        lambda ranks: 1 <= ranks <= 2**20 and 2**20 % ranks == 0,
        "must be a power of two",
    ),
    "dry_run": (lambda ranks: 0 <= ranks <= 10**6, "must be a number of ranks, at most 1000000"),
}
"""Field -> which numbers it may be, and that in words. None is for a field to allow."""


@dataclass(kw_only=True)
class SparseBalanceConfig:
    """Block-sparse attention with balanced budgets (SparseBalance, arXiv:2604.13847).

    The field ``name_of_field`` becomes the flag ``--sparse-balance-name-of-field``; ``enabled`` is
    ``--sparse-balance`` itself. The text under a field is the flag's help.
    """

    enabled: bool = False
    """Replace core attention by budgeted block-sparse attention and plan every step."""

    block_size: int = 256
    """Tokens in a KV block; blocks start anew at every document."""

    base_budget: int = 32
    """KV blocks a query may read before tuning, its own block included (MoBA's top-k)."""

    selection: str = field(
        default=DEFAULT_SELECTION,
        metadata={"argparse_meta": {"metavar": "NAME", "help": flag_help()}},
    )
    """Who selects; the registry has the names."""

    attention: AttentionImplementation = "auto"
    """Attention implementation; auto takes the fastest that runs on the device, an explicit choice
    never falls back."""

    router: Router = "auto"
    """Who ranks blocks for selection: Triton kernels, torch, or kernels on CUDA and torch elsewhere
    (auto). An explicit choice never falls back. Selections by columns and those of other packages
    leave no choice."""

    recompute_attention: RecomputeAttention = "again"
    """Attention in the layers that Megatron recomputes in backward: computed again, or kept from
    the forward, with its log-sum-exp and lists, until backward has used it. Numbers are the same;
    keeping takes memory, which the first lines of a run state."""

    eval_attention: EvaluationAttention = "sparse"
    """Attention of validation and test: sparse at base budgets, or dense. Never tuned."""

    batching: Batching = "makespan"
    """How the samples of a global batch are placed: in order of arrival, by tokens, by predicted
    latency (the paper), or by simulated makespan."""

    plan_ms: float | None = None
    """Search for makespan batching, in ms of a typical core; counted in simulated operations and
    never timed, so that all ranks find the same plan. By default 2 % of the step that it is for, as
    predicted at balanced latencies, and 10 % where widths are planned."""

    planning: Planning = "ahead"
    """When a step is planned: while the one before it runs, from what was known when that began; or
    on demand, when it begins itself and waits."""

    tuning: Tuning = "makespan"
    """How budgets follow the predicted times: not at all, towards an anchor latency (the paper), or
    against the step's makespan."""

    anchor: Anchor = "mean"
    """Latency that anchor tuning moves every micro-batch towards, taken over a step's
    micro-batches."""

    coverage_threshold: float = 0.1
    """Router score coverage that a sample may lose against the base budget, in every layer (the
    paper's p)."""

    coverage_target: CoverageTarget = "base"
    """What makespan tuning keeps besides the threshold: the samples' mean coverage at that of the
    base budgets or above, over this step's and the next samples, or nothing (the fastest step)."""

    coverage_slack: float = 0.0
    """By how much mean coverage may be below the coverage target base (0.002 is 0.2 points): what
    steps with one giant document ask for, which else wait for it."""

    coverage_mean_over: CoverageMeanOver = "samples"
    """What coverage target base takes the mean over: every sample counts alike, or every token, so
    that long samples count for more."""

    max_tokens_per_micro_batch: int | None = None
    """Token cap of a micro-batch, or of a rank's share of one; default: micro batch size x sequence
    length / context-parallel size."""

    context_parallel: ContextParallel = "dynamic"
    """How many ranks share a row of samples: all those of a context-parallel group (static), or 1,
    2, 4, ... neighbours as the plan decides (dynamic)."""

    max_context_parallel: int | None = None
    """Ranks that may share a row with dynamic context parallelism, a power of two that divides the
    data-parallel times context-parallel size. Default: 1 without --context-parallel-size, else 8 or
    what a node holds, and at least --context-parallel-size."""

    exchange: ExchangeName = "all-gather"
    """How keys and values travel between ranks that share a row: gathered, one KV head at a time,
    or in a ring, or in rings within nodes and between them; rings need less memory and wait at
    every hop."""

    cost_table: str | None = None
    """Cost table measured by `sparse-balance profile`, or auto to measure at start-up on rank 0;
    without one, costs are counted operations."""

    gigabytes_per_second: float | None = None
    """What a rank receives keys and values with where ranks share a sample; default: as measured in
    the cost table, or 50."""

    overlong: Overlong = "split"
    """What happens to a document longer than the sequence length."""

    missing_loss_mask: MissingLossMask = "refuse"
    """In a blend where some sources have loss masks, those that have none: refused, or trained on
    with all of their tokens, as plain text beside conversations may be meant."""

    calibration: Calibration = "measured"
    """Which predicted times measured ones correct while training: those of stages and of single
    slow devices, those of stages, or none, which makes plans repeat exactly."""

    coverage_decay: float = 0.9
    """Weight of the past in the moving average of coverage curves."""

    device: Device = "auto"
    """Where the model runs; auto takes the CPU only where no CUDA device is visible."""

    log_dir: str | None = None
    """Directory for the logs, JSON lines: steps.jsonl by rank 0, ranks/ with a file of every
    rank."""

    log_megabytes: int = 64
    """Size that no log exceeds, per file and its predecessor together; the oldest lines go."""

    dry_run: int | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "?", "const": 0, "metavar": "WORLD_SIZE"}},
    )
    """Check flags, data and cost table, print the plan of the first step and stop. Plans for
    WORLD_SIZE ranks, none of which need exist, or without a number (0) for as many as are
    launched."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            choices = get_args(each.type) if get_origin(each.type) is Literal else ()
            if choices and value not in choices:
                raise ConfigError(
                    f"{flag_name(each.name)} {value}: must be one of {', '.join(choices)}"
                )
            if each.name in RANGES and value is not None:
                check_range(each.name, value, flag_name(each.name))
        check_name(self.selection)
        if self.max_context_parallel is not None and self.context_parallel != "dynamic":
            raise ConfigError(
                f"{flag_name('max_context_parallel')} {self.max_context_parallel}: is for dynamic "
                "context parallelism; use --sparse-balance-context-parallel dynamic"
            )


def check_range(field_name: str, value: float, flag: str) -> None:
    """Check a value of a field of :class:`SparseBalanceConfig`, by whichever flag it was given.

    Raises:
        ConfigError: naming the flag, the value and the rule.
    """
    allowed, rule = RANGES[field_name]
    if not isinstance(value, int | float) or not allowed(value):
        raise ConfigError(f"{flag} {value}: {rule}")


def flag_name(field_name: str) -> str:
    """The command-line flag of a field of :class:`SparseBalanceConfig`."""
    if field_name == "enabled":
        return "--sparse-balance"
    return "--sparse-balance-" + field_name.replace("_", "-")
