# SPDX-License-Identifier: Apache-2.0
"""The tables of research/quality.md, made of the JSON file alone."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from quality.arms import ARMS, FIXED, references_of
from quality.intervals import difference, of_arm
from quality.tasks import Task, study_of

_MARKS = "<!-- tables of {} -->", "<!-- end of {} -->"
"""Around what is made of a JSON file of that name."""
_NOTHING = "-"


def rewrite(page: Path, result: Path) -> None:
    """Put tables of ``result`` into the page, whose other text stays.

    Raises:
        ValueError: the page has no place for them.
    """
    found = json.loads(result.read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, found, result.name), encoding="utf-8")


def with_tables(text: str, found: Mapping[str, Any], name: str) -> str:
    """The page with the tables of a result of that name between its marks."""
    begin, end = (mark.format(name) for mark in _MARKS)
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"the page has no lines {begin} and {end}, between which tables go")
    tables = "\n\n".join(sections(found))
    return f"{before}{begin}\n{tables}\n{end}{after}"


def sections(found: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: the setting and a table per task."""
    yield _setting(found)
    yield from tables(found["tasks"])


def tables(tasks: Mapping[str, Any]) -> Iterator[str]:
    """A table per task, of what its arms reach."""
    for name, arms in tasks.items():
        if arms:
            task = next(task for task in study_of(name).tasks if task.name == name)
            table = _losses(task, arms) if task.by_loss else _scores(task, arms)
            yield f"{_words(task, arms)}\n\n{table}"


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
        f"{machine['torch']}, megatron-core {machine['megatron-core']}."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (header, *rows))
    return "\n".join([first, f"|---|{'---:|' * (len(header) - 1)}", *others])


def _interval(arm: Mapping[str, Any], figure: str, **form: Any) -> str:
    found = of_arm(arm, figure)
    return _NOTHING if found is None else found.text(**form)


def _difference(arms: Mapping[str, Any], name: str, figure: str, **form: Any) -> str:
    references = [arms[each] for each in references_of(name) if each in arms]
    found = difference(arms[name], references, figure)
    return _NOTHING if found is None else found.text(sign=True, **form)


def _ordered(arms: Mapping[str, Any]) -> list[str]:
    """Arms of the page: tuned ones that select per token and KV head are in the file alone."""
    return [
        name for name in ARMS if name in arms and (name == FIXED or FIXED in references_of(name))
    ]


def _words(task: Task, arms: Mapping[str, Any]) -> str:
    labels = int(fmean(next(iter(arms.values()))["labels"]))
    words = f"**{task.name}** ({task.title}): {labels:,} scored labels per arm and seed."
    return f"{words} A guess is right in {task.chance:.1%}."


def _scores(task: Task, arms: Mapping[str, Any]) -> str:
    """Columns that no arm has figures for are left out."""
    per_cent = {"scale": 100.0, "digits": 1}
    rows = []
    for name in _ordered(arms):
        arm = arms[name]
        row = {
            "arm": f"`{name}`",
            "accuracy, %": _interval(arm, "accuracy", **per_cent),
            "less its reference": _difference(arms, name, "accuracy", **per_cent),
        }
        for number, (low, high) in enumerate(pairwise(study_of(task.name).length_edges)):
            values = [seed[number] for seed in arm.get("accuracy_by_length", ())]
            row[f"of {low} to {high - 1} tokens"] = _mean(values, 100.0, 1)
        row |= {
            "loss": _mean(arm["loss"], digits=4),
            "read dense": _mean(arm["accuracy_dense"], 100.0, 1),
            "block pairs": _mean(arm["work_ratio"]),
            "planned step, µs": _mean(arm.get("planned_step_ms", ()), 1e3, 2),
            "seeds": str(len(arm["seeds"])),
        }
        rows.append(row)
    kept = [key for key in rows[0] if any(row[key] != _NOTHING for row in rows)]
    return _table(kept, [[row[key] for key in kept] for row in rows])


def _losses(task: Task, arms: Mapping[str, Any]) -> str:
    """Losses less those of the reference, by the tokens of documents and at late positions, and how
    even the steps' losses and gradients were."""
    lengths = list(pairwise(study_of(task.name).length_edges))
    parts = {
        f"documents of {low} to {high - 1} tokens": ("loss_by_length", number)
        for number, (low, high) in enumerate(lengths)
    } | {f"tokens after {task.edges[-2]}": ("loss_by_place", -1)}
    split = {
        name: dict(arm)
        | {part: [seed[number] for seed in arm[key]] for part, (key, number) in parts.items()}
        for name, arm in arms.items()
    }
    rows = []
    for name in [name for name in ARMS if name in arms]:
        arm, less = split[name], "less its reference"
        row = {"arm": f"`{name}`", "loss": _interval(arm, "loss", digits=3)}
        row |= {
            part: _difference(split, name, figure, digits=3)
            for part, figure in {less: "loss", **{part: part for part in parts}}.items()
        }
        row |= {
            "highest loss over its running median": _mean(arm["loss_rise"], digits=2),
            "gradient norm": _mean(arm["grad_norm"], digits=2),
            "seeds": str(len(arm["seeds"])),
        }
        rows.append(row)
    return _table(list(rows[0]), [list(row.values()) for row in rows])


def _mean(values: Sequence[float | None], scale: float = 1.0, digits: int = 3) -> str:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return f"{fmean(known) * scale:.{digits}f}" if known else _NOTHING
