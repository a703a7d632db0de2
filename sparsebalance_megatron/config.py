# SPDX-License-Identifier: Apache-2.0
"""The one configuration object; flags and options of files are generated from its fields.

Annotations stay evaluated here: Megatron's flag generator reads them as types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from sparsebalance_megatron.errors import ConfigError as ConfigError
from sparsebalance_megatron.layer_budgets import (
    ALL_DENSE,
    MAX_BLOCKS,
    OTHERS,
    check_first_blocks,
    has_dense_layers,
    layer_budgets_text,
    parse_layer_budgets,
)
from sparsebalance_megatron.selector_registry import (
    POLICIES,
    SELECTORS,
    default_first_blocks,
    flag_help,
)

Batching = Literal["arrival", "length", "latency", "makespan"]
Overlong = Literal["split", "truncate", "drop"]
MissingLossMask = Literal["refuse", "train"]
Device = Literal["auto", "cpu", "cuda"]
Calibration = Literal["measured", "stages", "off"]
EvaluationAttention = Literal["sparse", "dense"]
ContextParallel = Literal["static", "dynamic"]
Positions = Literal["planned", "fixed"]
Planning = Literal["ahead", "on-demand"]
AttentionImplementation = Literal["auto", "triton", "fa4", "blocks", "tokens", "reference"]
DenseAttention = Literal["auto", "fa4", "model", "torch"]
Router = Literal["auto", "triton", "torch"]
CountedDevice = Literal["a100", "h100", "h200", "b200"]


FILE_FLAG = "--sparse-balance-config"
ONLY_IN_FILE = frozenset(
    {"attention", "dense_attention", "router", "positions", "plan_ms"}
    | {"planning", "context_parallel", "segment_tokens", "counted_device", "window_share"}
    | {"gigabytes_per_second", "missing_loss_mask", "calibration", "log_megabytes"}
)
"""Fields without a flag of their own: ``--sparse-balance-config`` sets them."""
DEFAULT_SELECTION = "token-query-head"
DEFAULT_COUNTED_DEVICE: CountedDevice = "h200"
_MOST_DIGITS = 9
MOST_WINDOW_STEPS = 16

RANGES: dict[str, tuple[float, float, str]] = {
    "block_size": (2, 2**20, "tokens, a power of two"),
    "base_budget": (1, MAX_BLOCKS, "blocks, a query's own included"),
    "first_blocks": (0, 16, "blocks"),
    "coverage_threshold": (0.0, 0.999, "of the coverage"),
    "plan_ms": (0.0, 1e4, "ms"),
    "log_megabytes": (1, 10**6, "MB"),
    "max_tokens_per_micro_batch": (1, 2**40, "tokens"),
    "max_context_parallel": (1, 2**20, "ranks, a power of two"),
    "max_segments": (1, 64, "segments"),
    "segment_tokens": (1, 2**24, "tokens"),
    "window": (1, MOST_WINDOW_STEPS, "steps"),
    "window_share": (0.25, 0.5, "of a step, one of the two"),
    "gigabytes_per_second": (1e-3, 1e5, "GB/s"),
    "dry_run": (0, 10**6, "ranks"),
}
"""Field -> least and largest number, and what it counts. Whether it may be None, its type says."""
_DIVIDE_THE_LARGEST = ("block_size", "max_context_parallel", "window_share")


@dataclass(kw_only=True)
class SparseBalanceConfig:
    """Block-sparse attention with balanced budgets (SparseBalance, arXiv:2604.13847).

    The field ``name_of_field`` becomes the flag ``--sparse-balance-name-of-field``, or the option
    ``name-of-field`` of ``--sparse-balance-config``; ``enabled`` is ``--sparse-balance`` itself.
    The text under a field is its help.
    """

    enabled: bool = False
    """Replace core attention by budgeted block-sparse attention and plan every step. Without it
    Megatron trains unchanged."""

    block_size: int = 256
    """Tokens in a KV block; blocks start anew at every document. Smaller blocks select more finely
    and cost more to score."""

    base_budget: int = 32
    """KV blocks that a query may read before tuning, its own block included (MoBA's top-k). Raise
    it for more coverage, at more time for every long document."""

    layer_budgets: str | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "BUDGET:LAYERS"}}
    )
    """Layers, from 0, with base budgets of their own, or dense: for instance dense:0-1,33-35
    16:2-32. Raise budgets where a layer's coverage is low, or keep the last dense as MoBA does."""

    sensitivity: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """Layers' sensitivities, a file that `sparse-balance sensitivity` writes. Base budgets by layer
    follow, at the time of the base budget in all layers. Give it where a model starts from trained
    weights: few layers carry its look-ups."""

    dense_up_to: str = field(
        default="auto", metadata={"argparse_meta": {"metavar": "auto|0|TOKENS"}}
    )
    """Longest document that layers at the base budget attend to densely; in layers with budgets of
    their own in proportion. auto: as long as that takes no more time than the base budget, by the
    cost table or counted; 0: only what budgets cover. Give TOKENS to train alike on another
    device."""

    selection: str = field(
        default=DEFAULT_SELECTION,
        metadata={"argparse_meta": {"metavar": "NAME", "help": flag_help()}},
    )
    """Who selects; the registry has the names."""

    first_blocks: int | None = None
    """Blocks at the beginning of a document that every query reads besides its own, within its
    budget. Default: 1, since pretrained models attend much to a document's first token; 0 where the
    selection keeps first tokens itself. Choose 0 for MoBA's own rule."""

    attention: AttentionImplementation = "auto"
    """Attention implementation. On CUDA auto takes whom the cost table found fastest of fa4
    (FlashAttention-4, extra fa4) and triton, without one triton, or gathered blocks or tokens where
    that does not serve. Name one to compare or to debug: it never falls back."""

    dense_attention: DenseAttention = "auto"
    """Who attends to dense documents: on CUDA FlashAttention-4 (extra fa4), the model's own
    attention (Transformer Engine's, in one piece), torch's; or (auto) whom the
    cost table found fastest, else the first of these that serves."""

    router: Router = "auto"
    """Who ranks blocks for selection: Triton kernels, torch, or kernels on CUDA and torch elsewhere
    (auto). Name one to compare: it never falls back. Selections without a choice refuse it."""

    eval_attention: EvaluationAttention = "sparse"
    """Attention of validation and test, never tuned: sparse at base budgets, or dense. Choose dense
    to see what selection costs the model."""

    batching: Batching = "makespan"
    """How samples are placed: in order of arrival, by tokens, by predicted latency (the paper), or
    by simulated makespan. Choose arrival for a baseline, latency to repeat the paper."""

    positions: Positions = "planned"
    """Micro-batches of a step without a pipeline, where ranks wait for one another in every layer
    (expert parallelism) or cp_sizes are planned: as many as make the shortest step, at most global
    batch size / (micro-batch size x data-parallel size), or always that many (fixed). Choose fixed
    where a step's micro-batches must be those that Megatron counts."""

    plan_ms: float | None = None
    """Search for makespan batching, in ms of a typical core, counted in simulated operations.
    Default: 2 % of the predicted step, 6 % where micro-batches are packed, 10 % where cp_sizes are
    planned; raise it where plans stay far above their lower bound."""

    planning: Planning = "ahead"
    """When a step is planned: while the one before it runs, or when it begins (on-demand). Choose
    on-demand to plan with the newest measurements; every step then waits for its plan."""

    tuning: str = field(default="raise", metadata={"argparse_meta": {"metavar": "NAME"}})
    """How budgets follow the predicted times: not at all, towards the mean latency of a step's
    micro-batches (anchor, the paper), or raised where ranks would idle, never below the base
    budget (raise), or by a package's policy (docs/EXTENDING.md). Choose off to keep attention as it
    is."""

    coverage_threshold: float = 0.1
    """Router score coverage that a sample may lose against the base budget, in every layer, under
    tuning anchor (the paper's p). Lower it for coverage, raise it for speed."""

    max_tokens_per_micro_batch: int | None = None
    """Most tokens of a micro-batch on one rank; default: micro-batch size x sequence length /
    context-parallel size. Lower it where single steps run out of memory."""

    context_parallel: ContextParallel = "dynamic"
    """How many ranks share a micro-batch: the context-parallel size (static), or 1, 2, 4, ...
    neighbours as planned (dynamic). Choose static to compare with Megatron's own."""

    max_context_parallel: int | None = None
    """Most ranks that share a micro-batch where context parallelism is dynamic, a power of two.
    Default: 1 without --context-parallel-size; else in mode exact as many as divide the heads, in
    others 8 or a node's ranks. Raise it where one sample holds up steps."""

    max_segments: int = 1
    """Most segments in which a micro-batch passes the pipeline; the plan chooses how many. Raise it
    to 8 where long samples leave pipeline stages idle."""

    window: int = field(default=1, metadata={"argparse_meta": {"metavar": "STEPS"}})
    """Steps within which samples change places after learning-rate warm-up. Try 4 where one sample
    holds up steps; other samples then share an optimizer step."""

    window_share: float = 0.25
    """Share of a step that windows gather by length. 0.5 is faster; tokens a step vary more."""

    segment_tokens: int = 4096
    """Least tokens of a segment. Lower it where samples are short and short segments lose
    little."""

    cost_table: str | None = None
    """Cost table measured by `sparse-balance profile`. Give one to train: without it, costs are
    counted operations."""

    counted_device: CountedDevice = DEFAULT_COUNTED_DEVICE
    """Device at whose rates operations are counted where there is no cost table. Name the one that
    you train on."""

    gigabytes_per_second: float | None = None
    """Rate at which ranks that share a micro-batch receive keys and values; default: that of the
    cost table, or 50. Set it where the table was measured on one rank."""

    overlong: Overlong = "split"
    """What happens to a document longer than the sequence length. Split loses nothing; choose
    truncate, which keeps the beginning, or drop where pieces of a document must not train."""

    missing_loss_mask: MissingLossMask = "refuse"
    """Sources of a blend without loss masks where others have them: refused, or trained on with all
    of their tokens. Choose train for plain text beside conversations."""

    calibration: Calibration = "measured"
    """Which predicted times measured ones correct: those of stages and of single slow devices,
    those of stages, or none. Turn it off to make plans repeat exactly."""

    device: Device = "auto"
    """Where the model runs; auto takes the CPU only where no CUDA device is visible. Choose cpu to
    try a run beside a GPU in use."""

    log_dir: str | None = None
    """Directory for the logs that summary, report and watch read."""

    log_megabytes: int = 64
    """Most megabytes of a log file and its predecessor together; the oldest lines go. Raise it to
    keep every step of a long run."""

    dry_run: int | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "?", "const": 0, "metavar": "WORLD_SIZE"}},
    )
    """Check flags, data and cost table, print the plan of the first step and stop. Give WORLD_SIZE
    to plan for ranks that need not exist; default: as many as are launched."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            choices = get_args(each.type) if get_origin(each.type) is Literal else ()
            if choices and value not in choices:
                raise ConfigError(
                    f"{flag_with(each.name, value)}: must be one of {', '.join(choices)}"
                )
            if each.name in RANGES and value is not None:
                check_range(each.name, value, flag_with(each.name, value))
        SELECTORS.check_name(self.selection)
        POLICIES.check_name(self.tuning)
        if self.sensitivity is not None and self.layer_budgets is not None:
            raise ConfigError(
                f"{flag_name('sensitivity')} with {flag_name('layer_budgets')}: both give budgets "
                "by layer; drop one"
            )
        by_layer: Mapping[int, int] = {}
        if self.layer_budgets is not None:
            # A command line gives words; equal budgets have one text.
            given: object = self.layer_budgets
            words = given if isinstance(given, list | tuple) else [given]
            text = " ".join(map(str, words))
            by_layer = parse_layer_budgets(text)
            self.layer_budgets = layer_budgets_text(by_layer)
        budgets = dict.fromkeys(by_layer.values(), flag_with("layer_budgets", self.layer_budgets))
        if OTHERS not in by_layer:
            budgets[self.base_budget] = flag_with("base_budget", self.base_budget)
        check_first_blocks(flag_name("first_blocks"), self.first_blocks, budgets)
        text = self.dense_up_to = str(self.dense_up_to)
        if text != "auto" and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
            raise ConfigError(
                f"{flag_name('dense_up_to')} {text[:40]}: must be auto, or a number of tokens of "
                f"at most {_MOST_DIGITS} digits"
            )
        if self.attention == "tokens" and has_dense_layers(self.layer_budgets):
            raise ConfigError(
                f"{flag_with('attention', 'tokens')}: serves no dense layers, as of mode exact or "
                f"{flag_with('layer_budgets', self.layer_budgets)}; use auto"
            )
        if self.window > 1 and self.batching == "arrival":
            raise ConfigError(
                f"{flag_with('window', self.window)}: changes the order of samples, which "
                f"{flag_with('batching', 'arrival')} keeps; drop one"
            )
        if self.max_segments > 1 and self.tuning == "anchor":
            raise ConfigError(
                f"{flag_name('max_segments')} {self.max_segments}: has no effect with tuning "
                "anchor, which plans no segments; drop it, or use another tuning"
            )
        if self.max_context_parallel is not None and self.context_parallel != "dynamic":
            raise ConfigError(
                f"{flag_name('max_context_parallel')} {self.max_context_parallel}: is for dynamic "
                f"context parallelism; use {flag_with('context_parallel', 'dynamic')}"
            )

    @classmethod
    def of_mode(cls, mode: str, **options: Any) -> "SparseBalanceConfig":
        """The choices of ``--sparse-balance-mode``, with others that win over it.

        Raises:
            ConfigError: there is no such mode or option, or it has no effect beside the mode.
        """
        from sparsebalance_megatron.flags import fields_of_mode

        return cls(**fields_of_mode(mode, options))

    @property
    def leaves_attention(self) -> bool:
        """Whether Megatron's own attention may run: all layers are dense, and every micro-batch
        runs in one piece. Where ranks share micro-batches, heads have to travel between them
        (:meth:`.Exchange.heads_serve`)."""
        return self.layer_budgets == ALL_DENSE and self.tuning == "off" and self.max_segments == 1

    @property
    def model_may_attend(self) -> bool:
        """Whether the model's own attention may run for dense documents, if it takes packed
        sequences: where it is named, or no other kernel is."""
        lists = self.attention in ("auto", "fa4")
        return self.dense_attention == "model" or (self.dense_attention == "auto" and lists)

    @property
    def attends_by_lists(self) -> bool:
        """Whether a kernel was named that attends by lists: to dense documents by those of all
        blocks."""
        return self.attention in ("triton", "reference")

    @property
    def dense_up_to_tokens(self) -> int:
        """:attr:`dense_up_to`; 0 where costs are still to decide
        (:func:`.cost.dense_length.with_dense_length`)."""
        return 0 if self.dense_up_to == "auto" else int(self.dense_up_to)

    @property
    def selection_rule(self) -> str:
        """The selection and what it always reads: coverage is measured under one such rule."""
        first_blocks = self.first_blocks
        if first_blocks is None:
            first_blocks = default_first_blocks(self.selection)
        return f"{self.selection}, first blocks {first_blocks}" if first_blocks else self.selection


def check_range(field_name: str, value: float, given: str) -> None:
    """Check a value of a field of :class:`SparseBalanceConfig`, however it was given."""
    least, largest, unit = RANGES[field_name]
    allowed = isinstance(value, int if isinstance(least, int) else int | float)
    allowed = allowed and least <= value <= largest
    if not allowed or (field_name in _DIVIDE_THE_LARGEST and largest % value):
        raise ConfigError(f"{given}: must be {least} to {largest} {unit}")


def flag_name(field_name: str) -> str:
    """How the command line gives a field of :class:`SparseBalanceConfig`: by its flag, or by
    ``--sparse-balance-config`` and its name."""
    if field_name == "enabled":
        return "--sparse-balance"
    name = field_name.replace("_", "-")
    return f"{FILE_FLAG} {name}" if field_name in ONLY_IN_FILE else f"--sparse-balance-{name}"


def flag_with(field_name: str, value: object) -> str:
    """How the command line gives a field of :class:`SparseBalanceConfig` a value."""
    return f"{flag_name(field_name)}{'=' if field_name in ONLY_IN_FILE else ' '}{value}"
