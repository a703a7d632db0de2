# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark: who runs when, what is computed from times, and a tiny real run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import launch, show
from end_to_end.command import measure_layout, parse
from end_to_end.evaluation import bounds_ms, compare, judge, summarise
from end_to_end.giants import lengths_with_giants, write_with_giants
from end_to_end.layouts import LAYOUTS, SEED
from end_to_end.results import StepResult, balanced_ms, read_steps
from end_to_end.variants import (
    ALL_VARIANTS,
    DENSE,
    FIXED,
    OURS,
    OURS_BASE,
    OURS_WIDE,
    VARIANTS,
    WITH_GIANTS,
    StepOrder,
)
from harness import MODEL_FLAGS, write_documents
from hypothesis import given
from hypothesis import strategies as st
from older_releases import needs_grouped_flash

from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.samples import SampleIndex

NARROW = [variant for variant in ALL_VARIANTS if not variant.wide]
TIMES = st.lists(st.floats(0.5, 100.0), min_size=4, max_size=4)
RESULT = StepResult(
    step_ms=10.0,
    balanced_ms=8.0,
    busy_ms=(9.0, 7.0),
    heaviest_over_mean=1.5,
    shared_micro_batches=0,
    coverage=0.75,
    base_coverage=0.7,
    work_ratio=1.0,
    guarded_samples=2,
    plan_ms=3.0,
    plan_wait_ms=0.5,
    tokens=100,
    lm_loss=5.0,
)


def test_defaults_follow_layout_and_device() -> None:
    usual, quick, gpu = parse([]), parse(["--quick", "--batches", "2"]), parse(["--layout=gpu-dp4"])
    assert (usual.layout, usual.device, usual.batches, usual.seq_length) == (
        "both",
        "cpu",
        30,
        8192,
    )
    assert (quick.batches, quick.seq_length) == (2, 2048)
    assert (gpu.device, gpu.seq_length) == ("cuda", 32768)
    assert parse(["--layout=dp2-giant"]).variants == list(WITH_GIANTS)
    assert usual.variants == [variant.name for variant in VARIANTS]
    assert parse(["--quick", "--", "--num-layers", "4"]).megatron_flags == ["--num-layers", "4"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--layout", "dp2", "--device", "cuda"],
        ["--batches", "0"],
        ["--plot", "x.svg", "--variants", "ours"],
        ["--layout", "dp2", "--variants", "fixed", "ours-wide"],
    ],
)
def test_wrong_usage_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(flags)


@pytest.mark.parametrize("variants", [1, 2, 3, 5, 8])
def test_every_variant_runs_in_every_place_and_after_every_other_equally_often(
    variants: int,
) -> None:
    rounds = 1 + variants % 2
    order = StepOrder(variants, rounds * variants)
    rows = [
        [order.variant(step) for step in range(order.steps) if order.batch(step) == batch]
        for batch in range(order.batches)
    ]
    assert all(sorted(row) == list(range(variants)) for row in rows)
    places = Counter((place, variant) for row in rows for place, variant in enumerate(row))
    assert set(places.values()) == {rounds}
    neighbours = Counter(pair for row in rows for pair in pairwise(row))
    assert len(neighbours) == variants * (variants - 1)
    assert set(neighbours.values()) <= {rounds}


@given(TIMES, TIMES, st.floats(0.0, 50.0))
def test_without_a_pipeline_balance_saves_what_the_slowest_rank_has_beyond_the_mean(
    forward: list[float], backward: list[float], rest_ms: float
) -> None:
    times = [np.array(values).reshape(2, 1, 1, 2) for values in (forward, backward)]
    busy_D = sum(times).sum(axis=(1, 2, 3))
    step_ms = busy_D.max() + rest_ms
    assert balanced_ms(step_ms, *times) == pytest.approx(step_ms - busy_D.max() + busy_D.mean())


@given(st.floats(0.5, 100.0), st.floats(0.5, 100.0), st.floats(0.0, 50.0))
def test_even_pipelines_are_balanced(forward: float, backward: float, rest_ms: float) -> None:
    shape = (2, 2, 1, 3)
    step_ms = 1000.0 + rest_ms
    even = balanced_ms(step_ms, np.full(shape, forward), np.full(shape, backward))
    assert even == pytest.approx(step_ms)


def test_one_long_micro_batch_of_a_pipeline_costs_time() -> None:
    forward = np.array([[1.0, 1.0, 6.0, 1.0], [1.0, 1.0, 6.0, 1.0]]).reshape(1, 2, 1, 4)
    # By hand, backward as long as forward: stage 0 ends the last backward after 29 ms; with four
    # micro-batches of 2.25 ms each way it would after five times 4.5 ms.
    assert balanced_ms(40.0, forward, forward) == pytest.approx(40.0 - 29.0 + 22.5)


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=1, max_size=12))
def test_paired_comparison(times_ms: list[tuple[float, float]]) -> None:
    reference_ms, variant_ms = np.array(times_ms).T
    found = compare(reference_ms, variant_ms, seed=1)
    ratios = [first / second for first, second in times_ms]
    assert found["speedup"] == pytest.approx(sum(reference_ms) / sum(variant_ms))
    assert found["median_ratio"] == pytest.approx(median(ratios))
    assert found["least_ratio"] == pytest.approx(min(ratios))
    low, high = found["interval"]
    assert min(ratios) * (1 - 1e-9) <= low <= high <= max(ratios) * (1 + 1e-9)
    assert found == compare(reference_ms, variant_ms, seed=1)


def test_summary_and_goals_follow_the_times() -> None:
    steps = {
        DENSE: replace(RESULT, step_ms=20.0, coverage=None, base_coverage=None, work_ratio=None),
        FIXED: RESULT,
        OURS_BASE: replace(RESULT, step_ms=8.0, busy_ms=(6.0, 6.0)),
    }
    found = summarise([steps, steps])
    assert bounds_ms([steps, steps]).tolist() == [8.0, 8.0]
    ours = found[OURS_BASE]
    assert ours["versus_fixed"]["interval"] == pytest.approx([1.25, 1.25])
    assert (ours["imbalance"], ours["waiting"]) == pytest.approx((1.0, 0.25))
    assert found[FIXED]["over_bound"] == pytest.approx(1.25)
    assert (found[DENSE]["coverage"], found[DENSE]["work_ratio"]) == (None, None)
    assert [goal["met"] for goal in judge("dp2", found)] == [True] * 4
    assert judge("gpu-dp4", found) == []
    without_dense = {name: step for name, step in steps.items() if name != DENSE}
    assert len(judge("dp2", summarise([without_dense]))) == 3

    slower = {**steps, OURS_BASE: replace(RESULT, step_ms=9.0, coverage=0.69)}
    met = {goal["goal"]: goal["met"] for goal in judge("dp2", summarise([slower]))}
    assert list(met.values()) == [False, False, False, True]


def test_rows_on_several_ranks_are_held_against_ours_without() -> None:
    steps = {
        FIXED: RESULT,
        OURS_BASE: replace(RESULT, step_ms=9.0),
        OURS_WIDE: replace(RESULT, step_ms=6.0, shared_micro_batches=1),
    }
    found = summarise([steps])
    assert found[OURS_WIDE]["shared_micro_batches"] == 1.0
    assert found[OURS_WIDE]["heaviest_over_mean"] == [1.5, 1.5]
    _, faster = judge("dp2-giant", found)
    assert (faster["value"], faster["met"]) == (pytest.approx(1.5), True)
    assert judge("dp2-giant", {name: found[name] for name in (FIXED, OURS_BASE)}) == []


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**31), st.integers(64, 600))
def test_every_global_batch_has_one_giant_of_five_times_its_mean(
    batches: int, others: int, seed: int, seq_length: int
) -> None:
    size = others + 1
    lengths = lengths_with_giants(batches, batch_size=size, seq_length=seq_length, seed=seed)
    documents = DocumentsOfLengths([length + 1 for length in lengths])
    index = SampleIndex(
        documents, (0, len(lengths)), max_tokens=seq_length, overlong="split", seed=seed
    )
    assert len(index) == len(lengths) == batches * size
    for batch in range(batches):
        tokens = sorted(index.lengths_of(index.global_batch(batch * size, size)).tolist())
        assert tokens[-1] == seq_length
        assert max(tokens[:-1]) <= seq_length / 16
        if size == 8:
            assert tokens[-1] >= 5 * sum(tokens) / size


class DocumentsOfLengths:
    """Stored documents of which only lengths are known."""

    prefix = "lengths"

    def __init__(self, lengths_tokens: list[int]) -> None:
        self.lengths_tokens = np.array(lengths_tokens)


def test_documents_with_giants_are_another_data_sets_tokens(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", [5, 30, 12])
    tokens = [Documents.open(source).read_tokens(n, 0, k) for n, k in enumerate((5, 30, 12))]
    found = Documents.open(write_with_giants(source, tmp_path / "made", (40, 3, 20)))
    assert found.lengths_tokens.tolist() == [41, 4, 21]
    stored = [found.read_tokens(n, 0, k) for n, k in enumerate((41, 4, 21))]
    assert np.concatenate(stored).tolist() == np.concatenate([*tokens, *tokens])[:66].tolist()


def write_log(directory: Path, order: StepOrder, ranks: int, **changed: Any) -> None:
    record = {
        "type": "step",
        "measured": {"forward_ms": [[[[1.0, 2.0, 3.0, 4.0]]]], "backward_ms": [[[[2.0] * 4]]]},
        "predicted": {"work_ratio": 0.9},
        "coverage": {"mean": 0.8, "base_mean": 0.7},
        **dict.fromkeys(("guarded_samples", "plan_ms", "plan_wait_ms"), 0),
        **{"tokens": 64, "lm_loss": 2.0, **changed},
    }
    records = [{"type": "run"}, *[{**record, "iteration": n + 1} for n in range(order.steps)]]
    (directory / "steps.jsonl").write_text("\n".join(map(json.dumps, records)))
    (directory / "ranks").mkdir()
    for rank in range(ranks):
        halves = [{"width": 2, "member": rank}, {"width": 1, "member": 0}]
        held = [{"type": "step", "iteration": n + 1, "micro_batches": halves} for n in range(2)]
        text = "\n".join(map(json.dumps, [{"type": "rank"}, *held]))
        (directory / "ranks" / f"rank-{rank:05d}.jsonl").write_text(text)
        times = [{"step": step, "ms": 100.0 * (rank + 1) + step} for step in range(order.steps)]
        (directory / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, times)))


def test_a_step_is_as_long_as_the_slowest_process(tmp_path: Path) -> None:
    variants, order = VARIANTS[:2], StepOrder(2, 3)
    write_log(tmp_path, order, ranks=2)
    batches = read_steps(tmp_path, order, variants, warm_up=1, ranks_in_turn=1)
    # The order turns from batch to batch; steps 2 to 5 are measured.
    assert [[batch[name].step_ms for name in (DENSE, FIXED)] for batch in batches] == [
        [203.0, 202.0],
        [204.0, 205.0],
    ]
    assert batches[0][FIXED].busy_ms == (18.0,)
    # Of the first two iterations the log of rank 0 holds a micro-batch on two ranks.
    assert [batch[FIXED].shared_micro_batches for batch in batches] == [0, 0]
    (first,) = read_steps(tmp_path, order, variants, warm_up=0, ranks_in_turn=1)[:1]
    assert [first[name].shared_micro_batches for name in (DENSE, FIXED)] == [1, 1]
    assert first[FIXED].heaviest_over_mean == pytest.approx(6.0 / 4.5)


def test_ranks_in_turn_count_the_slowest_rank_only(tmp_path: Path) -> None:
    variants, order = VARIANTS[1:2], StepOrder(1, 1)
    write_log(tmp_path, order, ranks=1)
    (batch,) = read_steps(tmp_path, order, variants, warm_up=0, ranks_in_turn=2)
    # Rank 0 computes 3 + 4 ms, rank 1 5 + 6 ms; 100 - 18 ms are everybody's.
    assert batch[FIXED].busy_ms == (7.0, 11.0)
    assert batch[FIXED].step_ms == pytest.approx(82.0 + 11.0)
    assert batch[FIXED].balanced_ms == pytest.approx(82.0 + 9.0)


@pytest.mark.parametrize(
    ("steps", "changed", "message"),
    [(3, {}, "expected 4"), (4, {"lm_loss": None}, "no finite loss")],
)
def test_logs_that_lack_something_are_refused(
    steps: int, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_log(tmp_path, StepOrder(1, steps), ranks=1, **changed)
    with pytest.raises(launch.BenchmarkError, match=message):
        read_steps(tmp_path, StepOrder(2, 2), VARIANTS[:2], warm_up=1, ranks_in_turn=1)


@needs_grouped_flash
def test_dense_peer_is_causal_attention_of_every_document() -> None:
    from end_to_end.attention import dense_attention

    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 4, 8), (9, 2, 8), (9, 2, 8)]
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [x.requires_grad_() for x in qkv]
    q, k, v = leaves
    expected = []
    for token in range(9):
        first = 0 if token < 6 else 6
        for head in range(4):
            keys, values = (x[first : token + 1, head // 2] for x in (k, v))
            weights = torch.softmax(keys @ q[token, head] * 0.3, dim=0)
            expected.append(weights @ values)
    expected_TD = torch.stack(expected).view(9, 32)
    found_TD = dense_attention(q, k, v, (0, 6, 9), 0.3)
    torch.testing.assert_close(found_TD, expected_TD)
    gradient = torch.randn(9, 32, generator=generator, dtype=torch.float64)
    for gradients in zip(
        *(torch.autograd.grad(out, leaves, gradient) for out in (found_TD, expected_TD)),
        strict=True,
    ):
        torch.testing.assert_close(*gradients)


@needs_grouped_flash
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2-slow", "gpu-dp4"])
def test_a_tiny_run_trains_every_batch_under_every_variant(layout: str, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", range(96, 256, 4))
    chosen, order = LAYOUTS[layout], StepOrder(len(NARROW), 3)
    launch.train(
        chosen,
        NARROW,
        order,
        [
            *(*MODEL_FLAGS, "--sparse-balance", "--data-path", str(documents)),
            *("--sparse-balance-block-size", "16", "--sparse-balance-base-budget", "4"),
            *("--sparse-balance-calibration", "off", "--sparse-balance-coverage-threshold", "0.3"),
        ],
        directory=tmp_path,
        device="cpu",
    )
    batches = read_steps(tmp_path, order, NARROW, warm_up=1, ranks_in_turn=chosen.ranks_in_turn)
    for batch in batches:
        assert list(batch) == [variant.name for variant in NARROW]
        assert {len(result.busy_ms) for result in batch.values()} == {
            chosen.processes * chosen.ranks_in_turn
        }
        assert batch[DENSE].coverage is None
        for name in (FIXED, "length", "latency", "makespan"):
            assert batch[name].coverage == pytest.approx(batch[name].base_coverage)
            assert batch[name].work_ratio == pytest.approx(1.0)
        for name in ("paper", OURS, OURS_BASE):
            assert batch[name].coverage >= batch[name].base_coverage - 0.3
    # Budgets follow what a variant itself observed, from its third batch on.
    for name in ("paper", OURS):
        assert batches[0][name].work_ratio == pytest.approx(1.0)
        assert batches[-1][name].work_ratio != pytest.approx(1.0)
    found = {
        "title": chosen.title,
        "batches": len(batches),
        "variants": summarise(batches),
        "goals": [],
    }
    show.draw({layout: found}, tmp_path / "picture.svg")
    assert "perfect balance" in (tmp_path / "picture.svg").read_text()


@needs_grouped_flash
@pytest.mark.distributed
def test_a_tiny_run_with_giants_lays_them_on_both_ranks(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", range(96, 256, 4))
    lengths = lengths_with_giants(1, batch_size=8, seq_length=256, seed=SEED)
    data = write_with_giants(source, tmp_path / "train", lengths)
    options = parse(
        [
            *("--layout", "dp2-giant", "--batches", "1", "--warm-up", "0", "--seq-length", "256"),
            *("--directory", str(tmp_path), "--variants", DENSE, *WITH_GIANTS),
        ]
    )
    flags = [
        *(*MODEL_FLAGS, "--sparse-balance", "--sparse-balance-calibration", "off"),
        *("--sparse-balance-block-size", "16", "--sparse-balance-base-budget", "4"),
        # Counted operations take no time beside what travels at a bandwidth of this world.
        *("--sparse-balance-gigabytes-per-second", "1e6"),
    ]
    found = measure_layout(LAYOUTS["dp2-giant"], flags, ["--data-path", str(data)], options)
    found = json.loads(json.dumps(found))
    assert found["batches"] == 1
    assert set(found["step_ms"]) == {DENSE, *WITH_GIANTS}
    for name, summary in found["variants"].items():
        assert summary["shared_micro_batches"] == (name == OURS_WIDE)
        assert {f"versus_{each}" for each in (FIXED, DENSE, OURS_BASE)} <= summary.keys()
        assert len(summary["heaviest_over_mean"]) == 2
        assert np.isfinite(summary["lm_loss"])
    assert [goal["goal"] for goal in found["goals"]] == [
        "coverage, of base budgets on the same scores",
        "speedup over ours without shared rows",
    ]
