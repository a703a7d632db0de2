# SPDX-License-Identifier: Apache-2.0
"""The tables of research/quality.md, made of the JSON file alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from quality.arms import ARMS, FIXED, KV_HEAD, reference_of
from quality.intervals import difference, of_arm
from quality.picture import proxy_picture
from quality.tasks import Task, study_of

BEGIN, END = "<!-- made by benchmarks/quality.py --page -->", "<!-- end -->"
_MARKED = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
PICTURE = "quality_proxy.svg"
_NOTHING = "-"
_PROXY = ("mass", "mass_within", "excess", "loss", "loss_within")


def rewrite(page: Path, result: Path) -> None:
    """Put tables and a picture of ``result`` into the page, whose other text stays.

    Raises:
        ValueError: the page has no place for them.
    """
    found = json.loads(result.read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, found), encoding="utf-8")
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    (images / PICTURE).write_text(proxy_picture(found["tasks"]), encoding="utf-8")


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """The page with the tables of a result between the marks."""
    if not _MARKED.search(text):
        raise ValueError(f"the page has no lines {BEGIN} and {END}, between which tables go")
    tables = "\n\n".join(sections(found))
    return _MARKED.sub(lambda match: f"{match[1]}{tables}\n{match[2]}", text)


def sections(found: Mapping[str, Any]) -> Iterator[str]:
    """Markdown, a section per task and one for coverage."""
    yield _setting(found)
    for name, arms in found["tasks"].items():
        if arms:
            task = next(task for task in study_of(name).tasks if task.name == name)
            yield f"### {name}: {task.title}\n\n{_scores(task, arms)}"
            yield f"{_by_place_words(task)}\n\n{_by_place(task, arms)}"
    yield f"### What training executed\n\n{_training(found['tasks'])}"
    probed = list(_probed(found["tasks"]))
    if probed:
        yield f"### Router coverage, attention mass and the budget\n\n{_proxies(probed)}"
        yield f"{_BUDGET_WORDS}\n\n{_budgets(probed)}"


_BUDGET_WORDS = (
    "The same models, read at other budgets than they were trained with: accuracy in per cent, for "
    "`stdlib` loss in nats, of the probed documents."
)


def _setting(found: Mapping[str, Any]) -> str:
    settings, machine = found["settings"], found["machine"]
    studies = "; ".join(
        f"{' and '.join(study['tasks'])}: {study['layers']} "
        f"{'layer' if study['layers'] == 1 else 'layers'}, {study['steps']} steps of "
        f"{study['batch_size']} documents of up to {study['longest_tokens']} tokens, blocks of "
        f"{study['block_size']}, base budget {study['base_budget']}"
        for study in settings["studies"].values()
    )
    return (
        f"{studies}. Seeds {', '.join(map(str, settings['seeds']))}; {machine['cpu']}, torch "
        f"{machine['torch']}, megatron-core {machine['megatron-core']}. ± is half a 95 % interval "
        "over seeds (Student's t); differences are paired by seed. The reference of an arm is the "
        f"fixed budget with the same selection if its name ends in {KV_HEAD}, else `{FIXED}`."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval(arm: Mapping[str, Any], figure: str, **form: Any) -> str:
    found = of_arm(arm, figure)
    return _NOTHING if found is None else found.text(**form)


def _difference(arms: Mapping[str, Any], name: str, figure: str, **form: Any) -> str:
    reference = reference_of(name)
    if name == reference or reference not in arms:
        return _NOTHING
    found = difference(arms[name], arms[reference], figure)
    return _NOTHING if found is None else found.text(sign=True, **form)


def _ordered(arms: Mapping[str, Any]) -> list[str]:
    return [name for name in ARMS if name in arms]


def _scores(task: Task, arms: Mapping[str, Any]) -> str:
    per_cent, nats = {"scale": 100.0, "digits": 1}, {"digits": 3}
    rows = [
        [
            f"`{name}`",
            _interval(arms[name], "accuracy", **per_cent),
            _difference(arms, name, "accuracy", **per_cent),
            _interval(arms[name], "loss", **nats),
            _difference(arms, name, "loss", **nats),
            _interval(arms[name], "accuracy_dense", **per_cent),
            _interval(arms[name], "loss_dense", **nats),
            str(len(arms[name]["seeds"])),
        ]
        for name in _ordered(arms)
    ]
    header = (
        *("arm", "accuracy, %", "less its reference", "loss, nats", "less its reference"),
        *("accuracy read dense", "loss read dense", "seeds"),
    )
    words = f"{int(fmean(next(iter(arms.values()))['labels'])):,} scored labels per arm and seed."
    if task.chance is not None:
        words += f" A guess is right in {task.chance:.1%}."
    return f"{words}\n\n{_table(header, rows)}"


def _by_place_words(task: Task) -> str:
    figure = "Loss in nats" if task.chance is None else "Accuracy in per cent"
    return f"{figure} by {task.place}, means over seeds:"


def _by_place(task: Task, arms: Mapping[str, Any]) -> str:
    places = [f"{low}-{high - 1}" for low, high in zip(task.edges, task.edges[1:], strict=False)]
    if all(high - low == 1 for low, high in zip(task.edges, task.edges[1:], strict=False)):
        places = [str(low) for low in task.edges[:-1]]
    figure, scale, digits = ("loss", 1.0, 3) if task.chance is None else ("accuracy", 100.0, 1)
    rows = []
    for name in _ordered(arms):
        seeds = arms[name][f"{figure}_by_place"]
        cells = [_mean(values, scale, digits) for values in zip(*seeds, strict=True)]
        rows.append([f"`{name}`", *cells])
    return _table(("arm", *places), rows)


def _mean(values: Sequence[float | None], scale: float = 1.0, digits: int = 3) -> str:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return f"{fmean(known) * scale:.{digits}f}" if known else _NOTHING


def _training(tasks: Mapping[str, Any]) -> str:
    """One row per arm and model; tasks of one model have the same figures."""
    rows, seen = [], set()
    for task_name, arms in tasks.items():
        study = study_of(task_name)
        for name in _ordered(arms):
            if (study.name, name) in seen:
                continue
            seen.add((study.name, name))
            arm = arms[name]
            rows.append(
                [
                    f"`{name}`",
                    study.name,
                    _interval(arm, "coverage", digits=3),
                    _interval(arm, "coverage_base", digits=3),
                    _mean(arm["budget_mean"], digits=2),
                    _mean(arm["budget_deviation"], digits=2),
                    _mean(arm["work_ratio"]),
                    _mean(arm["cpu_seconds"], digits=0),
                ]
            )
    header = (
        *("arm", "model", "coverage", "at base budgets", "mean budget", "deviation"),
        *("block pairs, of `fixed`", "CPU seconds"),
    )
    return _table(header, rows)


def _probed(tasks: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Task, arm and the arm's figures, of the arms whose models were probed."""
    for task, arms in tasks.items():
        for name in _ordered(arms):
            if "proxy" in arms[name]:
                yield task, name, arms[name]


def _proxies(probed: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    rows = []
    for task, name, arm in probed:
        figures = [_mean([seed[key] for seed in arm["proxy"]]) for key in _PROXY]
        rows.append([f"`{name}`", task, *figures])
    header = (
        *("arm", "task", "coverage and mass", "at one budget", "mass less coverage"),
        *("coverage and loss", "at one budget"),
    )
    words = (
        "Correlations (Pearson's r) over documents, layers and budgets, and the mean of those of "
        "single budgets, where only documents differ. Mass is what dense attention over the same "
        "queries and keys puts into the blocks that the budget selects."
    )
    picture = f"![Coverage against attention mass and loss](images/{PICTURE})"
    return f"{words}\n\n{_table(header, rows)}\n\n{picture}"


def _budgets(probed: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """A table per task."""
    tables = []
    for task in dict.fromkeys(task for task, _, _ in probed):
        chance = next(each for each in study_of(task).tasks if each.name == task).chance
        figure, scale, digits = ("loss", 1.0, 3) if chance is None else ("accuracy", 100.0, 1)
        arms = {name: arm["by_budget"] for each, name, arm in probed if each == task}
        rows = []
        for name, seeds in arms.items():
            by_seed = zip(*(seed[figure] for seed in seeds), strict=True)
            rows.append([f"`{name}`", *(_mean(values, scale, digits) for values in by_seed)])
        budgets = next(iter(arms.values()))[0]["budgets"]
        tables.append(_table((f"{task}, budget", *map(str, budgets)), rows))
    return "\n\n".join(tables)
