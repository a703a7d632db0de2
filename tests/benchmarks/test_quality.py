# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark: what its documents ask, how runs are scored and tabulated, a tiny run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import REPOSITORY, python_environment
from older_releases import needs_grouped_flash
from quality import text
from quality.arm_session import ArmScheduler, with_expensive_attention
from quality.arms import ARMS, DENSE, FIXED, OURS, PAPER, RANDOM, in_order
from quality.command import lacking, main, parse, planned_runs, verdict
from quality.correlation import by_budget, proxy_of, scatter
from quality.documents import Document
from quality.intervals import difference, interval, of_arm
from quality.launch import executed_figures
from quality.lookup import DEPTHS, Lookup
from quality.masked_attention import masked_attention
from quality.page import BEGIN, END, with_tables
from quality.proxy import block_mass, kept_mass_S
from quality.results import assemble, beside, load, save, seeds_of
from quality.run_spec import RunSpec
from quality.scoring import in_rows
from quality.scoring_sums import Tally, added
from quality.tasks import STACKED, STUDIES, held_out_documents, training_documents
from step_cases import BLOCK_SIZE, SHAPE, planned_step

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selectors import SELECTORS, rank_row
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Part

LOOKUPS = pytest.mark.parametrize("lookup", [STACKED, Lookup(stacked=False)])
RESULT = REPOSITORY / "benchmarks" / "results" / "quality.json"
SPEC = RunSpec(
    study_name="lookup",
    arm_name=FIXED,
    seed=0,
    steps=4,
    share=1.0,
    data="",
    directory="",
)


def answer(lookup: Lookup, document: Document, query: int) -> int:
    """The value that stands where the document says that a query's answer stands."""
    at = query - int(document.places[query])
    key = document.tokens[query] - lookup.values
    if not lookup.stacked:
        assert document.tokens[at] == document.tokens[query]
        return int(document.tokens[at + 1])
    pair = document.tokens[at] - (lookup.values + lookup.keys + lookup.noise)
    assert pair // lookup.values == key
    return int(pair % lookup.values)


@LOOKUPS
def test_recall_scores_values_and_knows_how_far_back_they_stand(lookup: Lookup) -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        document = lookup.recall(generator)
        inputs = len(document.tokens) - 1
        assert lookup.shortest_tokens <= inputs <= lookup.longest_tokens
        assert document.tokens.max() < lookup.vocabulary
        queries = np.flatnonzero(document.scored)
        assert len(queries) == inputs // lookup.tokens_per_query
        for query in queries:
            assert document.tokens[query + 1] == answer(lookup, document, query)
        assert not document.places[~document.scored].any()


@LOOKUPS
def test_needles_lie_at_their_depth(lookup: Lookup) -> None:
    generator = np.random.default_rng(4)
    for depth in range(DEPTHS):
        document = lookup.needle(generator, depth)
        (query,) = np.flatnonzero(document.scored)
        assert document.places[query] == depth
        wanted = document.tokens[query] if not lookup.stacked else None
        body = document.tokens[:query]
        first_pair = lookup.values + lookup.keys + lookup.noise
        (at,) = np.flatnonzero(body == wanted if wanted is not None else body >= first_pair)
        low, high = depth / DEPTHS * len(body), (depth + 1) / DEPTHS * len(body)
        assert low - 3 < at < high
        value = body[at + 1] if wanted is not None else (body[at] - first_pair) % lookup.values
        assert document.tokens[query + 1] == value


def test_text_is_never_trained_on_and_scored() -> None:
    trained, scored = text.files_of(held_out=False), text.files_of(held_out=True)
    assert not {*trained} & {*scored} and len(scored) > 20
    document = next(
        text.text_documents(
            np.random.default_rng(0), scored, shortest_tokens=64, longest_tokens=128
        )
    )
    inputs = len(document.tokens) - 1
    assert 64 <= inputs <= 128 and document.scored.all()
    np.testing.assert_array_equal(document.places, np.arange(inputs))
    content = bytes(document.tokens.astype(np.uint8))
    assert any(content in path.read_bytes() for path in scored)


@pytest.mark.parametrize("name", STUDIES)
def test_documents_depend_on_study_purpose_and_seed_alone(name: str) -> None:
    study = STUDIES[name]
    first, again, other = (list(training_documents(study, seed, 3)) for seed in (0, 0, 1))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
    assert any(
        not np.array_equal(one.tokens, two.tokens) for one, two in zip(first, other, strict=True)
    )
    for task in study.tasks:
        held_out = held_out_documents(study, task, 0, 0.01)
        assert not np.array_equal(held_out[0].tokens, first[0].tokens)
        for document in held_out:
            places = document.places[document.scored]
            assert task.edges[0] <= places.min() <= places.max() < task.edges[-1]
            assert len(document.tokens) - 1 <= study.longest_tokens
            assert document.tokens.max() < study.vocabulary


def test_enough_labels_are_scored() -> None:
    """A point of accuracy is twice the standard error of ten thousand labels."""
    (recall, _), stdlib = STUDIES["lookup"].tasks, STUDIES["text"].tasks[0]
    for study, task in ((STUDIES["lookup"], recall), (STUDIES["text"], stdlib)):
        documents = held_out_documents(study, task, 0, 1.0)
        assert sum(document.scored.sum() for document in documents) > 10_000


def test_rows_hold_all_documents_in_order() -> None:
    documents = list(islice(training_documents(STUDIES["lookup"], 0, 30), 30))
    rows = list(in_rows(documents, 600))
    assert [document for row in rows for document in row] == documents
    assert all(sum(len(each.tokens) - 1 for each in row) <= 600 for row in rows)
    assert [len(row) for row in in_rows(documents[:3], 1)] == [1, 1, 1]


def test_a_tally_groups_by_place() -> None:
    tally = Tally(edges=(0, 4, 10))
    tally.add(np.array([0, 3, 4]), np.array([1.0, 0.0, 1.0]), np.array([0.1, 2.0, 0.2]))
    tally.add(np.array([9]), np.array([1.0]), np.array([0.3]))
    sums = added([tally.sums(), tally.sums()])
    assert sums["right"] == [2.0, 4.0] and sums["labels"] == [4.0, 4.0]
    assert sums["loss"] == pytest.approx([4.2, 1.0])
    with pytest.raises(ValueError, match="outside of edges"):
        tally.add(np.array([10]), np.array([1.0]), np.array([0.1]))


@pytest.mark.parametrize("selection", SELECTORS)
def test_masked_attention_is_that_of_the_kernels(selection: Any) -> None:
    """To rounding, gradients too: documents of 1 token, of whole blocks and of ragged ones."""
    generator = torch.Generator().manual_seed(0)
    layout = packed_layout((0, 1, 17, 48), 8, "cpu")
    q_THD, k_TGD, v_TGD = (
        torch.randn(48, heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    selector = SELECTORS[selection]
    ranking = rank_row(
        selector, q_THD, k_TGD, layout, softmax_scale=0.3, max_budget=3, observe=False
    )
    lists = selector.select(ranking, torch.tensor([1, 2, 3]))
    leaves = (q_THD, k_TGD, v_TGD)
    gradient = torch.randn(48, 4, 8, generator=generator, dtype=torch.float64)
    found, _ = masked_attention(*leaves, lists, softmax_scale=0.3)
    expected, _ = block_sparse_attention(
        *leaves, lists, softmax_scale=0.3, implementation="reference"
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_kept_mass_is_that_of_the_selected_blocks(selection: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    bounds, size, scale = (0, 11, 43), 4, 0.5
    layout = packed_layout(bounds, size, "cpu")
    q_THD = torch.randn(43, 4, 8, generator=generator)
    k_TGD = torch.randn(43, 2, 8, generator=generator)
    selector = SELECTORS[selection]
    ranking = rank_row(
        selector, q_THD, k_TGD, layout, softmax_scale=scale, max_budget=8, observe=False
    )
    context: Any = SimpleNamespace(layout=layout)
    mass_THN = block_mass(q_THD, k_TGD, context, scale)
    for budget in (1, 3, 8):
        lists = selector.select(ranking, torch.tensor([budget, budget]))
        expected = []
        for first, end in pairwise(bounds):
            kept = []
            for token in range(first, end):
                row = token if lists.by_token else int(layout.block_T[token])
                for head in range(4):
                    place = head if lists.counts_QC.shape[1] == 4 else head // 2
                    listed = lists.indices_QCK[row, place, : lists.counts_QC[row, place]].tolist()
                    scores_t = k_TGD[first : token + 1, head // 2] @ q_THD[token, head] * scale
                    p_t = scores_t.softmax(0).tolist()
                    kept.append(
                        sum(
                            p
                            for offset, p in enumerate(p_t)
                            if int(layout.block_T[first + offset]) in listed
                        )
                    )
            expected.append(np.mean(kept))
        np.testing.assert_allclose(kept_mass_S(mass_THN, lists), expected, rtol=1e-5)
    np.testing.assert_allclose(kept_mass_S(mass_THN, lists), 1.0, rtol=1e-5)


def test_replayed_budgets_go_to_other_samples_of_the_step() -> None:
    planned = planned_step()
    samples = sum(len(slot.samples) for slot in planned.plan.slots)
    layers = planned.plan.slots[0].budgets_LS.shape[0]
    replayed_TLS = np.arange(1, 1 + layers * samples).reshape(1, layers, samples)
    scheduler: Any = SimpleNamespace(
        job=SimpleNamespace(layers=layers), coverage=None, planned=lambda step: planned
    )
    experiment: Any = SimpleNamespace(executed={})

    def budgets_LS(rank: int, seed: int) -> np.ndarray:
        schedule = ArmScheduler(
            scheduler,
            experiment,
            rank=rank,
            steps=1,
            samples=samples,
            replayed_TLS=replayed_TLS,
            seed=seed,
        )
        found_LS = np.zeros((layers, samples), dtype=np.int64)
        for slot in schedule.planned(0).plan.slots:
            found_LS[:, list(slot.samples)] = slot.budgets_LS
            assert schedule.lengths_TS[0, list(slot.samples)].tolist() == [*slot.lengths_tokens]
        return found_LS

    mine_LS = budgets_LS(rank=0, seed=0)
    np.testing.assert_array_equal(mine_LS, budgets_LS(rank=1, seed=0))
    np.testing.assert_array_equal(np.sort(mine_LS, axis=1), replayed_TLS[0])
    assert not np.array_equal(mine_LS, replayed_TLS[0])
    assert not np.array_equal(mine_LS, budgets_LS(rank=0, seed=1))


def test_only_attention_gets_more_expensive() -> None:
    cost = CostModel.analytic(SHAPE, BLOCK_SIZE)
    found = with_expensive_attention(cost, 10.0)
    for before, after in (
        (cost.forward_ms, found.forward_ms),
        (cost.backward_ms, found.backward_ms),
    ):
        assert after[Part.ATTENTION] == tuple(10.0 * value for value in before[Part.ATTENTION])
        assert max(after[Part.ATTENTION]) > 0.0
        assert all(after[part] == before[part] for part in Part if part is not Part.ATTENTION)


def test_executed_figures_count_what_documents_have() -> None:
    spec = replace(SPEC, study_name="lookup")
    executed_TLS = np.array([[[6, 30]], [[0, 0]]])
    lengths_TS = np.array([[80, 24], [80, 80]])
    found = executed_figures(executed_TLS, lengths_TS, spec)
    # The second document has three blocks, and no budget makes it more.
    assert found["budget_mean"] == pytest.approx(4.5)
    pairs = sum(min(j, 6) for j in range(1, 11)) + 6
    assert found["work_ratio"] == pytest.approx(pairs / pairs)
    wide = executed_figures(np.full((1, 1, 2), 10), lengths_TS[:1], spec)
    assert wide["work_ratio"] == pytest.approx((55 + 6) / pairs)
    assert executed_figures(np.zeros((2, 1, 2)), lengths_TS, spec)["budget_mean"] is None


def test_arms() -> None:
    assert {DENSE, FIXED, PAPER, OURS, RANDOM} <= {*ARMS}
    assert [arm.name for arm in in_order([RANDOM])] == [OURS, RANDOM]
    with pytest.raises(ValueError, match="must be among"):
        in_order(["none"])
    then_dense = ARMS["fixed-then-dense"]
    assert [then_dense.is_dense(step, 10) for step in (0, 8, 9, 10)] == [False, False, True, True]
    assert ARMS[DENSE].is_dense(0, 10) and not ARMS[FIXED].is_dense(10, 10)
    assert ARMS["half"].base_budget(6) == 3
    flags = ARMS["ours-token-mean"].flags(6)
    assert flags[flags.index("--sparse-balance-coverage-mean-over") + 1] == "tokens"


def test_runs_go_seed_by_seed_and_random_follows_what_it_replays(tmp_path: Path) -> None:
    options = parse(["--arms", RANDOM, DENSE, "--seeds", "1", "0", "--tasks", "recall", "needle"])
    runs = [(spec.seed, spec.arm_name) for spec in planned_runs(options, tmp_path)]
    assert runs == [(seed, arm) for seed in (1, 0) for arm in (DENSE, OURS, RANDOM)]
    random = next(spec for spec in planned_runs(options, tmp_path) if spec.arm_name == RANDOM)
    assert random.replay == str(tmp_path / "lookup_ours_1" / "executed.npz")
    with pytest.raises(SystemExit, match="2"):
        parse(["--page", "research/quality.md"])


def test_a_finished_run_is_known_by_its_settings(tmp_path: Path) -> None:
    spec = replace(SPEC, directory=str(tmp_path))
    assert load(spec) is None
    save(spec, {"seconds": 1.0})
    assert load(spec) == {"seconds": 1.0}
    assert load(replace(spec, steps=5)) is None
    assert load(RunSpec.read(str(spec.write()))) == {"seconds": 1.0}


def test_an_earlier_table_stands_beside_new_runs(tmp_path: Path) -> None:
    def table(*runs: tuple[str, int, float]) -> dict[str, Any]:
        specs = [replace(SPEC, study_name="lookup", arm_name=a, seed=s) for a, s, _ in runs]
        found = [finding(right, probe=True) for *_, right in runs]
        return assemble(list(zip(specs, found, strict=True)), ["recall", "needle"])

    earlier = table((FIXED, 0, 0.5), (FIXED, 2, 0.7), (DENSE, 0, 0.9))
    new = table((FIXED, 1, 0.6), (FIXED, 2, 0.8), (OURS, 0, 0.4))
    both = beside(new, earlier)
    assert both == table(
        (FIXED, 0, 0.5), (FIXED, 1, 0.6), (FIXED, 2, 0.7), (DENSE, 0, 0.9), (OURS, 0, 0.4)
    )
    assert beside({}, earlier) == earlier == beside(earlier, {})
    assert seeds_of(both)["lookup", FIXED] == {0, 1, 2}
    options = parse(["--arms", DENSE, FIXED, RANDOM, "--seeds", "0", "1", "--tasks", "recall"])
    left = lacking(list(planned_runs(options, tmp_path)), both)
    # OURS of seed 0 is there, and yet run: RANDOM takes its budgets, which no table holds.
    assert [(each.seed, each.arm_name) for each in left] == [
        *((0, OURS), (0, RANDOM)),
        *((1, DENSE), (1, OURS), (1, RANDOM)),
    ]


def test_tables_of_other_models_are_no_company(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(RESULT.read_text("utf-8"))
    table["settings"]["studies"]["lookup"]["steps"] += 1
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(table), "utf-8")
    assert main(["--beside", str(earlier), "--finished"]) == 1
    assert "models of lookup were trained otherwise" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse(["--beside", str(tmp_path / "none.json")])


def test_a_table_that_lacks_nothing_is_kept(tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    arguments = ["--arms", DENSE, FIXED, "--seeds", "0", "1", "2"]
    assert main([*arguments, "--beside", str(RESULT), "--json", str(again)]) == 0
    found, earlier = (json.loads(path.read_text("utf-8")) for path in (again, RESULT))
    assert found["tasks"] == earlier["tasks"]
    assert found["settings"] == earlier["settings"]


def test_intervals_are_those_of_student() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.text(digits=2) == "2.00 ± 2.48"
    assert interval([0.5]).text(scale=100.0, sign=True) == "+50.0"
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_differences_are_paired_by_seed() -> None:
    arm = {"seeds": [0, 2, 3], "loss": [1.0, 5.0, None]}
    reference = {"seeds": [2, 0, 1], "loss": [4.0, 0.5, 9.0]}
    found = difference(arm, reference, "loss")
    assert found is not None and (found.mean, found.count) == (0.75, 2)
    assert difference(arm, {"seeds": [7], "loss": [1.0]}, "loss") is None
    assert of_arm({"seeds": [0], "loss": [None]}, "loss") is None


def finding(right: float, *, probe: bool = False) -> dict[str, Any]:
    """What a run of the model of ``recall`` and ``needle`` found."""
    run: dict[str, Any] = {
        **dict.fromkeys(("seconds", "cpu_seconds", "training_loss"), 1.0),
        **dict.fromkeys(("coverage", "coverage_base", "budget_mean", "work_ratio"), 0.5),
        **{"budget_deviation": 0.0, "budget_quantiles": [6.0] * 5, "tasks": {}},
    }
    for task in STUDIES["lookup"].tasks:
        groups = len(task.edges) - 1
        sums = {"right": [right] * groups, "loss": [2.0] * groups, "labels": [10.0] * groups}
        run["tasks"][task.name] = {"own": sums, "dense": sums}
        if probe:
            run["tasks"][task.name]["probe"] = PROBE
    return run


PROBE = {
    "points": [
        *([0, 0, 1, 0.2, 0.3], [1, 0, 1, 0.4, 0.5], [0, 0, 2, 0.6, 0.7]),
        *([1, 0, 2, 0.8, 0.9], [0, 0, 9, 1.0, 1.0], [1, 0, 9, 1.0, 1.0]),
    ],
    "losses": [
        *([0, 1, 3.0, 0.0], [1, 1, 2.0, 0.5], [0, 2, 1.0, 0.5], [1, 2, 0.5, 1.0]),
        *([0, 9, 0.4, 1.0], [1, 9, 0.4, 1.0]),
    ],
}


def test_proxies_leave_out_budgets_that_read_everything() -> None:
    found = proxy_of(PROBE)
    assert found.mass == pytest.approx(1.0) and found.mass_within == pytest.approx(1.0)
    assert found.excess == pytest.approx(0.1)
    assert found.loss < -0.9 and found.loss_within == pytest.approx(-1.0)
    budgets = by_budget(PROBE)
    assert budgets == {"budgets": [1, 2, 9], "loss": [2.5, 0.75, 0.4], "accuracy": [0.25, 0.75, 1]}
    assert scatter(PROBE)["mass"][:2] == [[0.2, 0.3], [0.4, 0.5]]
    assert scatter(PROBE)["loss"][:2] == [[0.2, 3.0], [0.4, 2.0]]


def test_tables_are_made_of_the_result_alone() -> None:
    specs = [replace(SPEC, arm_name=arm, seed=seed) for arm in (FIXED, OURS) for seed in (0, 1)]
    rights = (8.0, 9.0, 9.0, 9.5)
    runs = [(spec, finding(right, probe=True)) for spec, right in zip(specs, rights, strict=True)]
    table = assemble(runs, ["recall", "stdlib"])
    assert table["recall"][OURS]["accuracy"] == pytest.approx([0.9, 0.95])
    assert table["recall"][OURS]["accuracy_sparse"] == table["recall"][OURS]["accuracy"]
    assert table["stdlib"] == {}
    study = {"tasks": ["recall"], "layers": 1, "steps": 4, "batch_size": 16}
    found = {
        "tasks": table,
        "machine": {"cpu": "a processor", "torch": "1", "megatron-core": "2"},
        "settings": {
            "seeds": [0, 1],
            "studies": {
                "lookup": study | {"longest_tokens": 256, "block_size": 8, "base_budget": 6}
            },
        },
    }
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    text = with_tables(page, found)
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text and with_tables(text, found) == text
    # t of one degree of freedom is 12.7: 2.5 points beside the mean, and as many beside the 7.5.
    assert "| `ours` | 92.5 ± 31.8 | +7.5 ± 31.8 |" in text
    with pytest.raises(ValueError, match="between which"):
        with_tables("a page without marks", found)


def test_dense_must_learn() -> None:
    assert verdict({"recall": {DENSE: {"accuracy": [0.9]}}}) == 0
    assert verdict({"recall": {DENSE: {"accuracy": [0.1]}}}) == 1
    assert verdict({"recall": {}}) == 0


def quality(tmp_path: Path, *arguments: str) -> str:
    """What the benchmark prints."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "quality.py"), *arguments]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_page_says_what_the_result_says() -> None:
    """research/quality.md is what ``--page`` would make of it now."""
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "quality.json").read_text())
    page = (REPOSITORY / "research" / "quality.md").read_text()
    assert with_tables(page, found) == page, (
        "run `python benchmarks/quality.py --page research/quality.md "
        "--json benchmarks/results/quality.json`"
    )


@needs_grouped_flash
@pytest.mark.distributed
def test_runs_are_scored_kept_and_replayed(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ("--quick", "--steps", "6", "--arms", RANDOM, "--json", str(result))
    first = quality(tmp_path, *arguments)
    assert first.count("s of CPU") == 2
    found = json.loads(result.read_text())["tasks"]["recall"]
    assert [*found] == [OURS, RANDOM]
    for arm in found.values():
        assert 0.0 <= arm["accuracy"][0] <= 1.0 and arm["loss"][0] > 0.0
        assert 0.0 < arm["coverage"][0] <= 1.0 and arm["seconds"][0] > 0.0
    # The same budgets, given to others: the mean changes only where documents are too short.
    assert found[RANDOM]["budget_mean"][0] == pytest.approx(found[OURS]["budget_mean"][0], rel=0.1)
    assert "s of CPU" not in quality(tmp_path, *arguments)


@needs_grouped_flash
@pytest.mark.distributed
def test_dense_attention_learns_in_a_quick_run(tmp_path: Path) -> None:
    assert "recall" in quality(tmp_path, "--quick", "--arms", DENSE)
