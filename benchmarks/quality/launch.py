# SPDX-License-Identifier: Apache-2.0
"""Starts runs one after the other: their data, their ranks, and what the ranks left."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end.launch import environment
from forked_ranks import run_ranks
from scipy.ndimage import median_filter

from quality.documents import write_documents
from quality.run_spec import RunSpec
from quality.scoring_sums import added
from quality.tasks import Study, training_documents
from sparsebalance_megatron.log.reader import read_run_log

TIMEOUT_S = 3600
_LAST_SHARE = 0.1
"""Share of the steps, the last ones, over which coverage is averaged."""
_TAIL_CHARACTERS = 4000
_TREND_STEPS = 9
_GRAD_NORM = re.compile(r"grad norm: ([\d.eE+-]+)")


class QualityError(ValueError):
    """A run failed."""


def prepared_data(study: Study, seed: int, steps: int, directory: Path) -> Path:
    """The prefix of the documents that a seed's models are trained on; written once."""
    count = study.batch_size * steps
    prefix = directory / "data" / f"{study.name}_{seed}_{count}"
    if not Path(f"{prefix}.idx").exists():
        write_documents(prefix, training_documents(study, seed, count), vocabulary=study.vocabulary)
    return prefix


def execute(spec: RunSpec) -> dict[str, Any]:
    """Train and score; what the ranks found, put together.

    Raises:
        QualityError: with the end of the output, if a rank fails.
    """
    path = spec.write()
    output = spec.folder / "output.log"
    output.unlink(missing_ok=True)
    code = run_ranks(
        spec.ranks,
        ["-m", "quality.rank", str(path)],
        environment=environment("cpu"),
        output=output,
        timeout_s=TIMEOUT_S,
        folder=Path(__file__).parents[1],
    )
    if code != 0:
        end = "no end in time" if code is None else f"exit code {code}"
        tail = output.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
        raise QualityError(
            f"{spec.study_name}, {spec.arm_name}, seed {spec.seed}: {end}; the end of {output}:\n"
            f"{tail}"
        )
    return _together(spec)


def budgets_file(spec: RunSpec) -> Path:
    """Executed budgets by step, layer and sample, of all ranks, and the samples' tokens."""
    return spec.folder / "executed.npz"


def _together(spec: RunSpec) -> dict[str, Any]:
    ranks = range(spec.ranks)
    parts = [json.loads((spec.folder / f"rank{rank}.json").read_text("utf-8")) for rank in ranks]
    arrays = [np.load(spec.folder / f"rank{rank}.npz") for rank in ranks]
    executed_TLS = np.sum([each["executed_TLS"] for each in arrays], axis=0)
    lengths_TS = arrays[0]["lengths_TS"]
    np.savez_compressed(budgets_file(spec), executed_TLS=executed_TLS, lengths_TS=lengths_TS)
    tasks = {}
    for task in parts[0]["tasks"]:
        mine = [part["tasks"][task] for part in parts]
        tasks[task] = {name: added([each[name] for each in mine]) for name in mine[0]}
    return {
        "tasks": tasks,
        "seconds": max(part["seconds"] for part in parts),
        "cpu_seconds": sum(part["cpu_seconds"] for part in parts),
        "scoring_seconds": max(part["scoring_seconds"] for part in parts),
        **_training_figures(spec),
        **executed_figures(executed_TLS, lengths_TS, spec),
    }


def _training_figures(spec: RunSpec) -> dict[str, Any]:
    """Coverage and loss at the end of training; by how much steps' losses deviate from their
    running median, and rise above it at most; the mean of the printed gradient norms; and what
    steps were predicted to take on the planned ranks, None where the arm executes other budgets
    than planned."""
    steps = read_run_log(spec.folder).steps
    last = steps[-max(1, round(_LAST_SHARE * len(steps))) :]
    losses = [step.lm_loss for step in last if step.lm_loss is not None]
    coverage, base = (
        [value for step in last if (value := getattr(step.figures, name)) is not None]
        for name in ("coverage", "coverage_base")
    )
    planned = [step.predicted.makespan_ms for step in steps]
    every = np.array([step.lm_loss for step in steps], dtype=np.float64)
    above = every - median_filter(every, _TREND_STEPS)
    printed = (spec.folder / "output.log").read_text("utf-8", errors="replace")
    return {
        "loss_deviation": float(above.std()),
        "loss_rise": float(above.max()),
        "grad_norm": float(np.mean([float(each) for each in _GRAD_NORM.findall(printed)] or 0.0)),
        "training_loss": float(np.mean(losses)),
        "coverage": float(np.mean(coverage)) if coverage else None,
        "coverage_base": float(np.mean(base)) if base else None,
        "planned_step_ms": None if spec.arm.changes_plans else float(np.mean(planned)),
    }


def executed_figures(
    executed_TLS: np.ndarray, lengths_TS: np.ndarray, spec: RunSpec
) -> dict[str, Any]:
    """What budgets training executed, in all of its sparse steps.

    ``work_ratio``: block pairs over those of the study's base budget, of the same documents.
    """
    sparse_T = (executed_TLS > 0).all(axis=(1, 2))
    if not sparse_T.any():
        return dict.fromkeys(("budget_mean", "budget_deviation", "budget_quantiles", "work_ratio"))
    budgets_TLS = executed_TLS[sparse_T].astype(np.int64)
    blocks_T1S = -(-lengths_TS[sparse_T, None].astype(np.int64) // spec.study.block_size)
    kept_TLS = np.minimum(budgets_TLS, blocks_T1S)
    base = _block_pairs(blocks_T1S, np.full_like(budgets_TLS, spec.study.base_budget))
    return {
        "budget_mean": float(kept_TLS.mean()),
        "budget_deviation": float(kept_TLS.std()),
        "budget_quantiles": np.quantile(kept_TLS, (0.0, 0.05, 0.5, 0.95, 1.0)).tolist(),
        "work_ratio": float(_block_pairs(blocks_T1S, budgets_TLS).sum() / base.sum()),
    }


def _block_pairs(blocks: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """The sum of min(j, k) over query blocks j."""
    kept = np.minimum(blocks, budgets)
    return kept * (kept + 1) // 2 + (blocks - kept) * kept
