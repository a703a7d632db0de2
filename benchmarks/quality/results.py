# SPDX-License-Identifier: Apache-2.0
"""Finished runs on disk, and the one JSON file that is made of them."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quality.run_spec import RunSpec
from quality.tasks import Task, study_of

RESULT = "result.json"
_OF_RUN = (
    *("seconds", "cpu_seconds", "training_loss", "coverage", "coverage_base"),
    "planned_step_ms",
    *("budget_mean", "budget_deviation", "budget_quantiles", "work_ratio"),
)
_OF_STEPS = ("loss_deviation", "loss_rise", "grad_norm")
"""Figures of a run that earlier releases did not write."""
_SETTINGS = ("study_name", "arm_name", "seed", "steps", "share", "ranks")
"""Settings that a finished run must share with the one asked for."""
_NUMBERS = re.compile(r"\[[-\d.,\se+null]+\]")
"""A list of numbers in JSON, over several lines."""


def save(spec: RunSpec, found: Mapping[str, Any]) -> None:
    """Keep a finished run."""
    settings = {name: asdict(spec)[name] for name in _SETTINGS}
    write_json(spec.folder / RESULT, {"settings": settings, "found": found})


def load(spec: RunSpec) -> dict[str, Any] | None:
    """What a run found, if it has finished with the same settings."""
    path = spec.folder / RESULT
    if not path.exists():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    wanted = asdict(spec)
    if any(saved["settings"].get(name) != wanted[name] for name in _SETTINGS):
        return None
    found: dict[str, Any] = saved["found"]
    return found


def write_json(path: Path, value: Any) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(_NUMBERS.sub(_on_one_line, json.dumps(value, indent=1)) + "\n", "utf-8")
    os.replace(partial, path)


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]")


def assemble(
    finished: Sequence[tuple[RunSpec, Mapping[str, Any]]], tasks: Sequence[str]
) -> dict[str, Any]:
    """``{task: {arm: {figure: [one per seed]}}}``; ``seeds`` says which.

    ``accuracy`` and ``loss`` are those of the arm's own attention; the same with ``_dense`` of the
    same weights read with dense attention, with ``_sparse`` at the base budget.
    """
    table: dict[str, Any] = {}
    for name in tasks:
        study = study_of(name)
        task = next(each for each in study.tasks if each.name == name)
        arms: dict[str, Any] = {}
        for spec, found in finished:
            if spec.study_name == study.name:
                figures = _figures(task, found)
                arm = arms.setdefault(spec.arm_name, {"seeds": []} | {key: [] for key in figures})
                arm["seeds"].append(spec.seed)
                for key, value in figures.items():
                    arm[key].append(value)
        table[name] = arms
    return table


def seeds_of(table: Mapping[str, Any]) -> dict[tuple[str, str], set[int]]:
    """Seeds that all tasks of a study have in the table, by study and arm."""
    found: dict[tuple[str, str], set[int]] = {}
    for name, arms in table.items():
        for arm, figures in arms.items():
            key, seeds = (study_of(name).name, arm), set(figures["seeds"])
            found[key] = found.get(key, seeds) & seeds
    return found


def beside(table: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables in one, by seed; where both have a run, that of ``earlier``."""
    names = [*earlier, *(name for name in table if name not in earlier)]
    return {name: _arms_beside(table.get(name, {}), earlier.get(name, {})) for name in names}


def _arms_beside(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    return dict(old) | {
        arm: _seeds_beside(figures, old[arm]) if arm in old else figures
        for arm, figures in new.items()
    }


def _seeds_beside(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    added = [n for n, seed in enumerate(new["seeds"]) if seed not in old["seeds"]]
    seeds = [*old["seeds"], *(new["seeds"][n] for n in added)]
    order = sorted(range(len(seeds)), key=seeds.__getitem__)
    both = {}
    for key, values in old.items():
        joined = [*values, *(new[key][n] for n in added)]
        both[key] = [joined[n] for n in order]
    return both


def _figures(task: Task, found: Mapping[str, Any]) -> dict[str, Any]:
    scored = found["tasks"][task.name]
    figures: dict[str, Any] = {}
    # A reading that is not there has the same budget as the arm's own.
    for suffix, reading in (("", "own"), ("_dense", "dense"), ("_sparse", "sparse")):
        sums = scored.get(reading, scored["own"])
        labels = sum(sums["labels"])
        figures[f"accuracy{suffix}"] = sum(sums["right"]) / labels
        figures[f"loss{suffix}"] = sum(sums["loss"]) / labels
        for figure, name in (("accuracy", "right"), ("loss", "loss")):
            figures[f"{figure}{suffix}_by_place"] = [
                value / count if count else None
                for value, count in zip(sums[name], sums["labels"], strict=True)
            ]
    figures["labels"] = sum(scored["own"]["labels"])
    sums = scored["own_by_length"]
    for figure, name in (("accuracy", "right"), ("loss", "loss")):
        figures[f"{figure}_by_length"] = [
            value / count if count else None
            for value, count in zip(sums[name], sums["labels"], strict=True)
        ]
    for name in _OF_STEPS:
        figures[name] = found.get(name)
    return figures | {name: found[name] for name in _OF_RUN}
