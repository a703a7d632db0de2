# SPDX-License-Identifier: Apache-2.0
"""Layouts, models and Megatron's flags for them."""

from dataclasses import dataclass

GPU_RANKS = 4
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread. ``processes`` run at once; each plays ``ranks_in_turn`` ranks.

    ``model``: flags that win over the usual model's; ``seq_length`` where it is not the usual one.
    ``segments``: one variant runs micro-batches in segments; ``shared``: in one, ranks may share
    them; ``windows``: in one, samples change places between steps. ``lockstep``: ranks wait for one
    another in every layer, so that measured times of micro-batches hold waiting and say nothing
    about balance.
    """

    name: str
    title: str
    processes: int
    flags: tuple[str, ...]
    ranks_in_turn: int = 1
    model: tuple[str, ...] = ()
    seq_length: int | None = None
    segments: bool = False
    shared: bool = False
    windows: bool = False
    lockstep: bool = False


_QUICKSTART_MODEL = (
    *("--hidden-size", "128", "--ffn-hidden-size", "256"),
    *("--sparse-balance-block-size", "256", "--sparse-balance-base-budget", "4"),
)
_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2"),
)
_SHARDED = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--ckpt-format", "torch_dist")

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            name="dp2",
            title="two data-parallel ranks, four micro-batches each",
            processes=2,
            flags=("--micro-batch-size", "1", "--global-batch-size", "8"),
        ),
        Layout(
            name="dp2-shared",
            title="two data-parallel ranks, two micro-batches each, which both may share",
            processes=2,
            flags=(
                *("--micro-batch-size", "1", "--global-batch-size", "4"),
                *("--sparse-balance-max-context-parallel", "2"),
            ),
            shared=True,
        ),
        Layout(
            name="dp2-window",
            title="two data-parallel ranks, two micro-batches each; samples change places in one "
            "variant",
            processes=2,
            flags=("--micro-batch-size", "1", "--global-batch-size", "4"),
            windows=True,
        ),
        Layout(
            name="pp2",
            title="two pipeline stages (1F1B), eight micro-batches",
            processes=2,
            flags=(
                *("--micro-batch-size", "1", "--global-batch-size", "8"),
                *("--pipeline-model-parallel-size", "2"),
            ),
        ),
        Layout(
            name="ep2",
            title="two data-parallel ranks that exchange tokens of four experts in every layer",
            processes=2,
            flags=("--micro-batch-size", "1", "--global-batch-size", "8", *_EXPERTS),
            model=_QUICKSTART_MODEL,
            lockstep=True,
        ),
        Layout(
            name="fsdp2",
            title="two data-parallel ranks that gather the weights of every layer (torch's FSDP2)",
            processes=2,
            flags=("--micro-batch-size", "1", "--global-batch-size", "8", *_SHARDED),
            model=_QUICKSTART_MODEL,
            lockstep=True,
        ),
        *(
            Layout(
                name=f"pp2-deep-{samples}",
                title=f"two pipeline stages of four layers, {samples} micro-batches",
                processes=2,
                flags=(
                    *("--micro-batch-size", "1", "--global-batch-size", str(samples)),
                    *("--pipeline-model-parallel-size", "2", "--sparse-balance-max-segments", "8"),
                ),
                model=("--num-layers", "8"),
                seq_length=16384,
                segments=True,
            )
            for samples in (2, 4)
        ),
        Layout(
            name="gpu-dp4",
            title=f"one device plays {GPU_RANKS} data-parallel ranks in turn; a step is the "
            "slowest rank's time; nothing is communicated",
            processes=1,
            flags=("--micro-batch-size", "1", "--global-batch-size", str(4 * GPU_RANKS)),
            ranks_in_turn=GPU_RANKS,
        ),
    )
}

_ANY_MODEL = (
    *("--group-query-attention", "--position-embedding-type", "rope", "--swiglu"),
    *("--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
SMALL_MODEL = (
    *_ANY_MODEL,
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "192"),
    *("--num-attention-heads", "4", "--num-query-groups", "2", "--kv-channels", "32"),
    "--untie-embeddings-and-output-weights",
)
"""Small enough for one core, and narrow: attention takes most of an 8K document's time."""
QWEN_LIKE_MODEL = (
    *_ANY_MODEL,
    *("--num-layers", "24", "--hidden-size", "896", "--ffn-hidden-size", "4864"),
    *("--num-attention-heads", "14", "--num-query-groups", "2", "--kv-channels", "64"),
    *("--add-qkv-bias", "--rotary-base", "1000000"),
)
"""Qwen2.5-0.5B's layers; the vocabulary is the data set's."""
GPU_FLAGS = (
    *("--bf16", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
"""For a GPU without Transformer Engine and Apex; recomputation keeps 32K rows in memory."""


def model_flags(*, device: str, seq_length: int) -> list[str]:
    """Model, length and block sizes for a device, "cpu" or "cuda"."""
    on_gpu = device == "cuda"
    model = (*QWEN_LIKE_MODEL, *GPU_FLAGS) if on_gpu else SMALL_MODEL
    block_size, base_budget = (256, 16) if on_gpu else (128, 8)
    return [
        *model,
        *("--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)),
        *("--sparse-balance", "--sparse-balance-device", device),
        *("--sparse-balance-block-size", str(block_size)),
        *("--sparse-balance-base-budget", str(base_budget)),
        *("--sparse-balance-coverage-threshold", "0.1"),
    ]


def training_flags(*, steps: int) -> list[str]:
    return [
        *("--train-iters", str(steps), "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--clip-grad", "1.0", "--seed", str(SEED), "--log-interval", "1"),
        *("--eval-iters", "0", "--eval-interval", "1000000", "--split", "100,0,0"),
    ]
