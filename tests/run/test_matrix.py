# SPDX-License-Identifier: Apache-2.0
"""What Megatron users combine the plugin with: every layout trains to the losses of one rank.

All runs of a model load the same weights, train on the same global batches, and must log the same
losses and gradient norms. One run covers several features that do not touch one another;
docs/SUPPORT.md names the run of each.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data.tokenizers_of_tests import train_tokenizer
from harness import (
    BALANCE_FLAGS,
    CHANGED,
    FEW_ROUNDINGS,
    MODEL_FLAGS,
    PROGRAMS,
    TRAINING_FLAGS,
    VOCABULARY,
    TrainingRun,
    assert_order_is_simulated,
    long_tailed_lengths,
    measured_ms,
    read_steps,
    run_training,
    write_documents,
)

from sparsebalance_megatron.cli import main

pytestmark = pytest.mark.distributed

BFLOAT16_ROUNDING = 2.0**-8
"""A sum in another order may round a weight to its neighbour."""
LAST_PRINTED_DIGIT = 1.01e-3
"""One unit in the last printed digit of gradient norms, and rounding."""

STEPS = 4
PROGRAM = ("-m", "sparsebalance_megatron.pretrain_gpt")
WITH_NORMS = (CHANGED, "marked-norms")
DRAWN_CP_SIZES = (str(PROGRAMS / "shared_micro_batches.py"),)
OWN_ATTENTION = (CHANGED, "own-attention")
OWN_DROPOUT = (CHANGED, "own-dropout")
SHARDED = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Megatron refuses FSDP2 where kernels queue up behind one another."""
DRAWN_SEGMENTS = (str(PROGRAMS / "drawn_segments.py"),)

PIPELINE = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
ON_CPU = "--sparse-balance-device cpu"
SEQUENCE = f"--sequence-parallel {ON_CPU}"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
INTERLEAVED = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
CONTEXT = "--context-parallel-size 2"
SHARED_BY_2 = "--sparse-balance-max-context-parallel 2"
SHARED_BY_4 = "--sparse-balance-max-context-parallel 4"
PLANNED_CP_SIZES = "--sparse-balance-batching makespan"
CAPPED = "--sparse-balance-max-tokens-per-micro-batch 128"
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective"
YARN = (
    "--position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 64"
)
CUT = f"{PIPELINE} --sparse-balance-max-segments 4 {ON_CPU}"


def without(flags: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """``flags`` less those names and the values that follow them."""
    kept, skipping = [], False
    for word in flags:
        skipping = word in names or (skipping and not word.startswith("--"))
        kept += [] if skipping else [word]
    return tuple(kept)


class Model(NamedTuple):
    """Flags of a model; ``batching`` is how layouts place samples (one rank: order of arrival).

    ``weights`` names the model whose weights it starts from; ``tolerance`` is relative, of losses
    after the first step; ``data`` are data sets of :func:`documents`, with weights where they are
    blended; ``program`` trains it on one rank.
    """

    flags: tuple[str, ...]
    batching: str = "latency"
    weights: str | None = None
    tolerance: float = FEW_ROUNDINGS
    data: str = "any"
    program: tuple[str, ...] = PROGRAM


DENSE_UP_TO = "--sparse-balance-dense-up-to"
EXACT = ("--sparse-balance-mode", "exact")
LLAMA = (*MODEL_FLAGS, "--use-rope-scaling")
LLAMA_YARN = (*without(MODEL_FLAGS, "--position-embedding-type"), *YARN.split())
# Tensor-parallel ranks share the only KV head.
GPT2 = f"""
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --qk-layernorm
    --group-query-attention --num-query-groups 1 --seq-length 256 --max-position-embeddings 256
    --attention-dropout 0 --hidden-dropout 0 --cross-entropy-loss-fusion
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
    --sparse-balance-selection token-query-head"""
EXPERTS = """
    --num-experts 4 --moe-layer-freq ([0,1]*2) --moe-ffn-hidden-size 64
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01
    --moe-shared-expert-intermediate-size 64"""
LATENT = """
    --multi-latent-attention --kv-lora-rank 24 --q-lora-rank 32 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type yarn --rotary-scaling-factor 4
    --mscale-all-dim 1 --softmax-type learnable"""
LATENT_LLAMA = (
    *without(LLAMA, "--group-query-attention", "--num-query-groups"),
    *LATENT.split(),
)
MODELS = {
    "llama": Model(LLAMA),
    "llama bf16": Model((*LLAMA, "--bf16"), "arrival", "llama", BFLOAT16_ROUNDING),
    "yarn": Model(LLAMA_YARN, weights="llama"),
    "gpt2": Model(tuple(GPT2.split())),
    "vertical-slash": Model(
        (*LLAMA, "--sparse-balance-selection", "vertical-slash"), weights="llama"
    ),
    "layers": Model(
        (*LLAMA, "--sparse-balance-layer-budgets", "dense:0,3", "2:1"), weights="llama"
    ),
    "lengths": Model((*LLAMA, DENSE_UP_TO, "128"), weights="llama"),
    "exact": Model((*LLAMA, *EXACT), "makespan", "llama"),
    "dropout": Model((*LLAMA, *EXACT), "makespan", "llama", program=OWN_DROPOUT),
    "exact experts": Model(
        *((*LLAMA_YARN, *EXPERTS.split(), "--moe-aux-loss-coeff", "0", *EXACT), "makespan"),
        *("experts", FEW_ROUNDINGS, "even"),
    ),
    "sinks": Model((*LLAMA, "--softmax-type", "learnable")),
    "exact sinks": Model((*LLAMA, "--softmax-type", "learnable", *EXACT), "makespan", "sinks"),
    "latent": Model(LATENT_LLAMA),
    "latent lengths": Model((*LATENT_LLAMA, DENSE_UP_TO, "128"), weights="latent"),
    "exact latent": Model((*LATENT_LLAMA, *EXACT), "makespan", "latent"),
    "own latent": Model(
        (*LATENT_LLAMA, *EXACT, "--softmax-type", "vanilla"), "makespan", "latent vanilla"
    ),
    "latent vanilla": Model((*LATENT_LLAMA, "--softmax-type", "vanilla")),
    # The balancing loss of experts is taken per micro-batch, padding included.
    "experts": Model((*LLAMA_YARN, *EXPERTS.split()), "arrival", data="even"),
    # Several micro-batches of a rank, or segments of one, balance experts otherwise than one.
    "experts unbalanced": Model(
        *((*LLAMA_YARN, *EXPERTS.split(), "--moe-aux-loss-coeff", "0"), "arrival", "experts"),
        data="even",
    ),
    "blend": Model(
        (*LLAMA, "--sparse-balance-config", "missing-loss-mask=train"),
        *("latency", "llama", FEW_ROUNDINGS, "0.4 any 0.6 masked"),
    ),
    "conversations": Model((*LLAMA, "--vocab-size", "511"), data="conversations"),
}


class Layout(NamedTuple):
    model: str
    ranks: int
    flags: str
    program: tuple[str, ...] = PROGRAM


LAYOUTS = {
    "interleaved": Layout(
        "llama", 2, f"{INTERLEAVED} --overlap-p2p-communication-warmup-flush {SELECTIVE}"
    ),
    "data-overlapped": Layout("llama", 2, f"{OVERLAP} {RECOMPUTE} uniform"),
    "tensor": Layout("llama", 2, f"{TENSOR} {RECOMPUTE} block --distribute-saved-activations"),
    "tensor-sequence": Layout("llama", 2, f"{TENSOR} {SEQUENCE} {SELECTIVE}", WITH_NORMS),
    "custom-layout": Layout("llama", 2, f"{PIPELINE} --pipeline-model-parallel-layout E|tt|t|tL"),
    "data-pipeline-uneven": Layout(
        *("llama", 4),
        f"{PIPELINE} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
        "--use-distributed-optimizer --use-tp-pp-dp-mapping",
    ),
    "bf16-pipeline": Layout("llama bf16", 2, f"{PIPELINE} --use-distributed-optimizer"),
    "tied-pipeline": Layout("gpt2", 2, f"{PIPELINE} --account-for-embedding-in-pipeline-split"),
    "tensor-pipeline": Layout(
        "gpt2", 4, f"{TENSOR} {PIPELINE} --account-for-loss-in-pipeline-split"
    ),
    "latent-data-pipeline": Layout("latent", 4, f"{PIPELINE} {RECOMPUTE} uniform"),
    "sinks-tensor-sequence": Layout("sinks", 2, f"{TENSOR} {SEQUENCE} {SELECTIVE}", WITH_NORMS),
    "layers-pipeline": Layout("layers", 2, f"{PIPELINE} {RECOMPUTE} uniform"),
    "layers-interleaved": Layout("layers", 4, INTERLEAVED),
    "lengths-data": Layout("lengths", 2, f"{RECOMPUTE} uniform"),
    "sharded": Layout("llama", 2, SHARDED),
    "exact-data": Layout("exact", 2, f"{OVERLAP} {SELECTIVE}"),
    "exact-pipeline": Layout("exact", 4, "--pipeline-model-parallel-size 4"),
    "own-pipeline": Layout("exact", 2, f"{PIPELINE} {RECOMPUTE} uniform", OWN_ATTENTION),
    "own-sharded": Layout("exact", 2, SHARDED, OWN_ATTENTION),
    "own-lengths": Layout("lengths", 2, f"{RECOMPUTE} uniform", OWN_ATTENTION),
    "experts-pipeline": Layout("experts", 4, f"--expert-model-parallel-size 2 {PIPELINE}"),
    "experts-tensor-sequence": Layout("experts", 2, f"{TENSOR} {SEQUENCE}", WITH_NORMS),
}


SHARED_ROWS = {
    "shared": Layout(
        "llama", 2, f"{SHARED_BY_2} {PLANNED_CP_SIZES} {CAPPED} {OVERLAP} {RECOMPUTE} uniform"
    ),
    "context-static-yarn": Layout(
        "yarn", 2, f"{CONTEXT} --sparse-balance-config context-parallel=static"
    ),
    "context-learned-positions": Layout("gpt2", 2, f"{CONTEXT} {PLANNED_CP_SIZES}"),
    "shared-data4": Layout(
        "llama", 4, f"{SHARED_BY_4} {ON_CPU} --use-distributed-optimizer", DRAWN_CP_SIZES
    ),
    "shared-pipeline": Layout("llama", 4, f"{PIPELINE} {SHARED_BY_2} {ON_CPU}", DRAWN_CP_SIZES),
    "shared-interleaved": Layout(
        "llama", 4, f"{INTERLEAVED} {SHARED_BY_2} {ON_CPU} {SELECTIVE}", DRAWN_CP_SIZES
    ),
    "shared-tensor": Layout("llama", 4, f"{TENSOR} {SHARED_BY_2} {ON_CPU}", DRAWN_CP_SIZES),
    "context-data-overlapped": Layout(
        "llama", 4, f"{CONTEXT} {SHARED_BY_4} {OVERLAP} {ON_CPU}", DRAWN_CP_SIZES
    ),
    "context-interleaved": Layout("llama", 4, f"{CONTEXT} {INTERLEAVED} {RECOMPUTE} uniform"),
    "context-tensor-sequence": Layout(
        "llama", 4, f"{CONTEXT} {TENSOR} {SEQUENCE} {PLANNED_CP_SIZES}", WITH_NORMS
    ),
    "shared-experts": Layout(
        *("experts unbalanced", 4, f"{SHARED_BY_4} {ON_CPU} --expert-model-parallel-size 2"),
        DRAWN_CP_SIZES,
    ),
    "context-experts": Layout(
        "experts unbalanced", 4, f"{CONTEXT} --expert-model-parallel-size 2 {PLANNED_CP_SIZES}"
    ),
    "context-layers": Layout("layers", 2, f"{CONTEXT} {PLANNED_CP_SIZES}"),
    "own-shared": Layout("exact", 2, f"{SHARED_BY_2} {CAPPED} {SELECTIVE}", OWN_ATTENTION),
    "own-context-pipeline": Layout("exact", 4, f"{CONTEXT} {PIPELINE}", OWN_ATTENTION),
    "own-context-tensor-sequence": Layout(
        "exact", 4, f"{CONTEXT} {TENSOR} {SEQUENCE}", OWN_ATTENTION
    ),
    "own-context-interleaved": Layout("exact", 4, f"{CONTEXT} {INTERLEAVED}", OWN_ATTENTION),
    "own-context-sharded": Layout("exact", 2, f"{SHARDED} {CONTEXT}", OWN_ATTENTION),
    "exact-shared-sharded": Layout("exact", 2, f"{SHARDED} {SHARED_BY_2} {CAPPED}"),
    "own-context-dropout": Layout("dropout", 4, f"{CONTEXT} {SHARED_BY_4}", OWN_DROPOUT),
    "own-context4": Layout("exact", 4, f"{SHARED_BY_4} --context-parallel-size 4", OWN_ATTENTION),
    "own-context-experts": Layout(
        "exact experts", 4, f"{CONTEXT} --expert-model-parallel-size 2", OWN_ATTENTION
    ),
    "own-lengths-shared": Layout(
        "lengths", 2, f"{SHARED_BY_2} {PLANNED_CP_SIZES} {CAPPED}", OWN_ATTENTION
    ),
    "own-context-latent": Layout("own latent", 2, CONTEXT, OWN_ATTENTION),
    "exact-shared4": Layout("exact", 4, f"{SHARED_BY_4} {OVERLAP}", DRAWN_CP_SIZES),
    "exact-context-tensor-sequence": Layout(
        "exact", 4, f"{CONTEXT} {TENSOR} {SEQUENCE}", WITH_NORMS
    ),
    "exact-shared-pipeline": Layout("exact", 4, f"{PIPELINE} {SHARED_BY_2}", DRAWN_CP_SIZES),
    "exact-context-interleaved": Layout("exact", 4, f"{CONTEXT} {INTERLEAVED}"),
    "exact-context-experts": Layout(
        "exact experts", 4, f"{CONTEXT} --expert-model-parallel-size 2"
    ),
    "exact-context-sinks": Layout("exact sinks", 2, CONTEXT),
    "exact-context-latent": Layout("exact latent", 2, CONTEXT),
    "lengths-shared4": Layout("lengths", 4, f"{SHARED_BY_4} {ON_CPU}", DRAWN_CP_SIZES),
    "context-bf16": Layout("llama bf16", 2, CONTEXT),
    "context-latent": Layout("latent", 2, f"{CONTEXT} {PLANNED_CP_SIZES}"),
    # Heads travel for lists, too, since no KV head is shared.
    "heads-latent": Layout(
        "latent lengths", 4, f"{PIPELINE} {SHARED_BY_2} {ON_CPU}", DRAWN_CP_SIZES
    ),
    "shared-latent": Layout("latent", 4, f"{SHARED_BY_4} {ON_CPU}", DRAWN_CP_SIZES),
    "context-vertical-slash": Layout("vertical-slash", 2, f"{CONTEXT} {PLANNED_CP_SIZES}"),
}
"""Rows lie on several ranks, as many as the plan says or as a lot says."""

CUTS = {
    "segments-pipeline4": ("llama", 4, "--pipeline-model-parallel-size 4"),
    "segments-data-overlapped": ("llama", 4, OVERLAP),
    "segments-packed": ("llama", 2, "--micro-batch-size 4"),
    "segments-blend": ("blend", 4, f"{TENSOR} --sequence-parallel"),
    "segments-conversations": ("conversations", 4, "--micro-batch-size 2"),
    "segments-recompute": ("llama", 4, f"{RECOMPUTE} block"),
    "segments-tensor-sequence": ("llama", 4, f"{TENSOR} --sequence-parallel {SELECTIVE}"),
    "segments-bf16": ("llama bf16", 4, "--use-distributed-optimizer"),
    "segments-tied-tensor": ("gpt2", 4, f"{TENSOR} --account-for-loss-in-pipeline-split"),
    "segments-latent": ("latent", 4, f"{RECOMPUTE} uniform"),
    "segments-layers": ("layers", 2, ""),
    "segments-shared": ("llama", 4, f"{SHARED_BY_2} {RECOMPUTE} uniform"),
    "segments-shared-vertical-slash": ("vertical-slash", 4, SHARED_BY_2),
    "segments-shared-data4": ("llama", 8, f"{SHARED_BY_4} {OVERLAP}"),
    "segments-shared-experts": (
        *("experts unbalanced", 8),
        f"{SHARED_BY_4} --expert-model-parallel-size 2",
    ),
    "segments-shared-tensor-sequence": ("llama", 8, f"{SHARED_BY_2} {TENSOR} --sequence-parallel"),
    "segments-shared-latent": ("latent", 4, f"{SHARED_BY_2} {SELECTIVE}"),
    "segments-lengths": ("lengths", 2, ""),
    "segments-exact": ("exact", 2, ""),
    "segments-shared-exact": ("exact", 4, f"{SHARED_BY_2} {RECOMPUTE} uniform"),
    "segments-expert-parallel": ("experts unbalanced", 4, "--expert-model-parallel-size 2"),
    "segments-experts-tensor-sequence": ("experts unbalanced", 4, f"{TENSOR} --sequence-parallel"),
}
SEGMENTS = {
    name: Layout(model, ranks, f"{CUT} {flags}", DRAWN_SEGMENTS)
    for name, (model, ranks, flags) in CUTS.items()
}
"""Micro-batches pass the pipeline in segments drawn by lot; where some are shared, so are those."""

EXPERT_GROUP = f"--expert-model-parallel-size 2 {PLANNED_CP_SIZES}"
POSITIONS = {
    "positions": Layout("experts unbalanced", 2, f"{EXPERT_GROUP} {OVERLAP} {RECOMPUTE} uniform"),
    # Gloo gathers no unequal tensors, as tensor-parallel ranks of experts would.
    "positions-tensor-sequence": Layout(
        *("experts unbalanced", 4),
        f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {PLANNED_CP_SIZES} "
        f"{TENSOR} {SEQUENCE} {SELECTIVE}",
        WITH_NORMS,
    ),
    "positions-shared": Layout("llama", 2, f"{CONTEXT} {PLANNED_CP_SIZES}"),
    "positions-exact": Layout("exact experts", 2, "--expert-model-parallel-size 2"),
    "positions-shared-experts": Layout("experts unbalanced", 2, f"{EXPERT_GROUP} {SHARED_BY_2}"),
    "positions-context": Layout(
        "experts unbalanced", 4, f"{CONTEXT} --expert-model-parallel-size 4 {PLANNED_CP_SIZES}"
    ),
}
"""Steps have fewer micro-batches than the batch sizes make: ranks run in lockstep or share them."""

ALL = LAYOUTS | SHARED_ROWS | SEGMENTS | POSITIONS

PER_PUSH = frozenset(
    {
        "segments-data-overlapped",
        "segments-recompute",
        "segments-shared",
        "context-latent",
        "tensor-pipeline",
        "layers-pipeline",
        "experts-tensor-sequence",
        "shared",
        "shared-pipeline",
        "positions",
        "exact-pipeline",
        "segments-exact",
        "positions-exact",
        "own-pipeline",
        "own-sharded",
        "sharded",
    }
)
"""They cover most pairs of parallelisms, and tied embeddings, experts, full recomputation and the
distributed optimizer; the other layouts are nightly."""


def tiered(layouts: dict[str, Layout]) -> list[Any]:
    """Names of layouts; what is not run per push is nightly."""
    return [
        name if name in PER_PUSH else pytest.param(name, marks=pytest.mark.nightly)
        for name in layouts
    ]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with documents of any length, others whose samples have even lengths, some with a
    loss mask, and conversations, of which only answers are trained on."""
    directory = tmp_path_factory.mktemp("documents")
    lengths = long_tailed_lengths(60, longest=250)
    write_documents(directory / "any", lengths)
    write_documents(directory / "even", [length + 1 - length % 2 for length in lengths])
    write_documents(directory / "masked", lengths[::-1], seed=8, masked=True)
    # A question is longer than a block, so that segments without an answer run.
    turns = [
        (f"{number} " * 20, f"{number}, " * (length // 4)) for number, length in enumerate(lengths)
    ]
    records = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in turns
    ]
    path = directory / "conversations.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    texts = (f"user: {asked}\nassistant: {said}\n" for asked, said in turns)
    tokenizer = train_tokenizer(texts, 300, directory / "tokenizer")
    prepare = ("prepare-data", "--input", str(path), "--tokenizer", tokenizer)
    assert main([*prepare, "--output-prefix", str(directory / "conversations")]) == 0
    return directory


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> list[str]:
    """Those that the selected layouts need."""
    own = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params["name"] for item in own}
    return sorted({ALL[name].model for name in names})


@pytest.fixture(scope="module")
def weights(
    models: list[str], documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A checkpoint of every untrained model: unlike initialising, loading ignores the layout."""
    sources = {name: MODELS[name].weights or name for name in models}
    untrained = {source: tmp_path_factory.mktemp("start") for source in set(sources.values())}

    def save(name: str) -> None:
        keep = ("--save", str(untrained[name]), "--save-interval", "1")
        one_step = (*without(TRAINING_FLAGS, "--train-iters", "--lr"), "--train-iters", "1")
        flags = (*MODELS[name].flags, *one_step, "--lr", "1e-30", *keep)
        run_training(1, (*flags, *_plugin(documents, name, "arrival"))).require_success()

    on_two_cores([lambda source=source: save(source) for source in untrained])
    return {name: untrained[source] for name, source in sources.items()}


@pytest.fixture(scope="module")
def one_rank(
    models: list[str],
    documents: Path,
    weights: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, TrainingRun]:
    """Every model on a single rank, samples in order of arrival."""

    def train(name: str) -> TrainingRun:
        return _train(
            *(1, name, (), documents, weights, "arrival", tmp_path_factory.mktemp("one")),
            MODELS[name].program,
        )

    runs = on_two_cores([lambda name=name: train(name) for name in models])
    return dict(zip(models, runs, strict=True))


@pytest.mark.parametrize("name", tiered(ALL))
def test_layout_trains_to_the_losses_of_one_rank(
    name: str,
    documents: Path,
    weights: dict[str, Path],
    one_rank: dict[str, TrainingRun],
    tmp_path: Path,
) -> None:
    """Ranks that share rows, and segments, see the same coverage, too, and count it once."""
    layout = ALL[name]
    model, expected = MODELS[layout.model], one_rank[layout.model]
    run = _train(
        *(layout.ranks, layout.model, tuple(layout.flags.split()), documents, weights),
        *(model.batching, tmp_path, layout.program),
    )
    _assert_trains_alike(run, expected, model)
    if name not in SEGMENTS:
        assert_order_is_simulated(tmp_path, layout.ranks)
    if name in LAYOUTS:
        pads = model.data != "even" and "--sequence-parallel" in layout.flags
        assert any(step["padded_tokens"] for step in run.steps) == pads
        return
    for step, other in zip(run.steps, expected.steps, strict=True):
        mean = other["figures"]["coverage"]
        assert step["figures"]["coverage"] == pytest.approx(mean, rel=model.tolerance)
    logs = [read_steps(tmp_path, rank) for rank in range(layout.ranks)]
    rows = [row for log in logs for row in log[0]["micro_batches"]]
    read = dict(
        pair for row in rows for pair in zip(row["samples"], row["lengths_tokens"], strict=True)
    )
    is_masked = run.steps[0]["tokens"] < sum(read.values())
    assert is_masked == (model.data not in ("any", "even"))
    if name in POSITIONS:
        _assert_plans_positions(run, tmp_path)
    elif name in SHARED_ROWS:
        assert (
            max(row["cp_size"] for log in logs for step in log for row in step["micro_batches"]) > 1
        )
    else:
        _assert_runs_in_segments(run, 2 if "--expert-model-parallel-size" in layout.flags else 1)
        assert any(max(map(max, step["cp_sizes_RM"])) > 1 for step in run.steps) == (
            "shared" in name
        )


def _assert_plans_positions(run: TrainingRun, log_dir: Path) -> None:
    """Steps have fewer micro-batches than the batch sizes make, and all of them are measured."""
    most = json.loads((log_dir / "steps.jsonl").read_text().partition("\n")[0])["job"][
        "micro_batches"
    ]
    counts = {measured_ms(step).shape[-1] for step in run.steps}
    assert min(counts) < most >= max(counts)
    for step in run.steps:
        assert (measured_ms(step) > 0.0).all()


def _assert_runs_in_segments(run: TrainingRun, lockstep_ranks: int) -> None:
    """Ranks run different numbers of segments unless they wait for one another in every layer, and
    the log has times of what ran."""
    for step in run.steps:
        assert (measured_ms(step) > 0.0).all()
    segments_RM = [step["segments_RM"] for step in run.steps]
    assert max(map(max, segments_RM[0])) > 1
    unequal = any(len(set(map(sum, each_RM))) > 1 for each_RM in segments_RM)
    assert unequal == (len(segments_RM[0]) > lockstep_ranks)
    for each_RM in segments_RM:
        assert all(len(set(map(tuple, group))) == 1 for group in batched(each_RM, lockstep_ranks))


def _assert_trains_alike(run: TrainingRun, expected: TrainingRun, model: Model) -> None:
    losses, expected_losses = run.logged("lm_loss"), expected.logged("lm_loss")
    assert len(losses) == len(expected_losses) == STEPS
    # Outputs that are merged of pieces are rounded once more, each token's by itself.
    of_mean = model.tolerance / math.sqrt(expected.logged("tokens")[0])
    assert losses[0] == pytest.approx(expected_losses[0], rel=max(FEW_ROUNDINGS, of_mean))
    assert losses == pytest.approx(expected_losses, rel=model.tolerance)
    assert len(set(expected_losses)) == STEPS
    norms, expected_norms = ([float(norm) for norm in of.grad_norms] for of in (run, expected))
    allowed = [max(LAST_PRINTED_DIGIT, model.tolerance * norm) for norm in expected_norms]
    assert all(
        abs(norm - other) <= limit
        for norm, other, limit in zip(norms, expected_norms, allowed, strict=True)
    ), (norms, expected_norms)
    assert run.logged("tokens") == expected.logged("tokens")


def _train(
    ranks: int,
    model: str,
    flags: tuple[str, ...],
    documents: Path,
    weights: dict[str, Path],
    batching: str,
    log_dir: Path,
    program: tuple[str, ...] = PROGRAM,
) -> TrainingRun:
    load = ("--load", str(weights[model]), "--finetune")
    plugin = _plugin(documents, model, batching)
    flags = (*MODELS[model].flags, *TRAINING_FLAGS, *load, *plugin, *flags)
    environment = CONNECTIONS if "--use-torch-fsdp2" in flags else {}
    run = run_training(
        ranks, flags, log_dir=log_dir, program=program, environment=environment
    ).require_success()
    assert ("own attention ran" in run.output) == (program[-1].startswith("own-"))
    return run


def _plugin(documents: Path, model: str, batching: str) -> tuple[str, ...]:
    words = MODELS[model].data.split()
    prefixes = [word if word[0].isdigit() else str(documents / word) for word in words]
    data = ("--data-path", *prefixes, "--ckpt-format", "torch_dist")
    placed = ("--sparse-balance-batching", batching)
    if EXACT[0] in MODELS[model].flags:
        return (
            *without(BALANCE_FLAGS, "--sparse-balance-base-budget", DENSE_UP_TO),
            *data,
            *placed,
        )
    given = without(BALANCE_FLAGS, *{DENSE_UP_TO}.intersection(MODELS[model].flags))
    return (*given, *data, *placed, "--sparse-balance-tuning", "off")


def on_two_cores(calls: list) -> list:
    """Results of ``calls``, which run a single rank each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
