# SPDX-License-Identifier: Apache-2.0
"""The one configuration object; every ``--sparse-balance-*`` flag is generated from its fields.

Annotations stay evaluated here: Megatron's flag generator reads them as types.
"""

from dataclasses import dataclass, field
from typing import Literal

Batching = Literal["arrival", "length", "latency", "makespan"]
Tuning = Literal["off", "anchor", "makespan"]
Anchor = Literal["mean", "min", "max"]
Granularity = Literal[
    "token-kv-head", "token-query-head", "previous-block", "first-query", "query-block-lookahead"
]
Overlong = Literal["split", "truncate", "drop"]
Device = Literal["auto", "cpu", "cuda"]
Calibration = Literal["measured", "stages", "off"]
EvaluationAttention = Literal["sparse", "dense"]
CoverageTarget = Literal["threshold", "base"]
ContextParallel = Literal["static", "dynamic"]
ExchangeName = Literal["all-gather", "ring", "hierarchical-ring"]
Planning = Literal["ahead", "on-demand"]
AttentionImplementation = Literal["auto", "triton", "blocks", "tokens", "reference"]


class ConfigError(ValueError):
    """A flag has a wrong value, or two flags do not work together."""


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

    selection: Granularity = "query-block-lookahead"
    """Who selects: a token per KV head, or a token per query head (MoBA's exact semantics); a block
    of queries per KV head, by the mean of the block before it (previous-block), by its first query
    (first-query) or by the mean of its own queries (query-block-lookahead). The last looks ahead:
    what a token reads depends on up to block size - 1 tokens after it, which a model that decodes
    has not seen. The others do not."""

    attention: AttentionImplementation = "auto"
    """Attention implementation; auto takes the fastest that runs on the device, an explicit choice
    never falls back."""

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

    overlong: Overlong = "split"
    """What happens to a document longer than the sequence length."""

    window: int = 1
    """Consecutive global batches that may exchange samples; above 1 the composition of batches
    changes."""

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
        self._require(self.block_size >= 1, "block_size", "must be at least 1 token")
        self._require(
            self.block_size & (self.block_size - 1) == 0, "block_size", "must be a power of two"
        )
        self._require(
            self.base_budget >= 1, "base_budget", "must be at least 1 block (a query's own)"
        )
        self._require(
            0.0 <= self.coverage_threshold < 1.0, "coverage_threshold", "must lie in [0, 1)"
        )
        self._require(0.0 <= self.coverage_slack < 1.0, "coverage_slack", "must lie in [0, 1)")
        self._require(0.0 <= self.coverage_decay < 1.0, "coverage_decay", "must lie in [0, 1)")
        self._require(
            self.plan_ms is None or 0.0 <= self.plan_ms < float("inf"),
            "plan_ms",
            "must be finite, at least 0 ms",
        )
        self._require(self.window >= 1, "window", "must be at least 1 global batch")
        self._require(self.log_megabytes >= 1, "log_megabytes", "must be at least 1 MB")
        self._require(
            self.max_tokens_per_micro_batch is None or self.max_tokens_per_micro_batch >= 1,
            "max_tokens_per_micro_batch",
            "must be at least 1 token",
        )
        width = self.max_context_parallel
        self._require(
            width is None or (width >= 1 and width & (width - 1) == 0),
            "max_context_parallel",
            "must be a power of two",
        )
        self._require(
            width is None or self.context_parallel == "dynamic",
            "max_context_parallel",
            "is for dynamic context parallelism; use --sparse-balance-context-parallel dynamic",
        )
        self._require(
            self.dry_run is None or self.dry_run >= 0, "dry_run", "must be a number of ranks"
        )

    def _require(self, condition: bool, field_name: str, rule: str) -> None:
        if not condition:
            value = getattr(self, field_name)
            raise ConfigError(f"{flag_name(field_name)} {value}: {rule}")


def flag_name(field_name: str) -> str:
    """The command-line flag of a field of :class:`SparseBalanceConfig`."""
    if field_name == "enabled":
        return "--sparse-balance"
    return "--sparse-balance-" + field_name.replace("_", "-")
