# SPDX-License-Identifier: Apache-2.0
"""How well models learn under budgets that change, against dense attention and fixed budgets.

Every arm trains a small GPT of its own in Megatron's loop through the plugin: two data-parallel
ranks over gloo, one thread each. Two idle cores take hours for all. All arms of a seed have the
same documents in the same global batches and the same initial weights. The models are scored on
held-out documents, with the attention that they were trained with at the base budget, and with
dense attention.

Arms with windows are those of dense attention with other samples in a step, and run where --arms
names them.

Arms run seed by seed, what the others are compared with first. A run that has finished with the
same settings is not run again, and --json is brought up to date after every run, so that the
command may be stopped and started; the tables are printed at the end. With --beside, what an
earlier table has is not run again, and stands in the new one beside what was. --page rewrites the
tables of a page from --json, and trains nothing.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from end_to_end.command import machine

from quality.arms import ARMS, DENSE, FIXED, USUAL_ARMS, in_order
from quality.launch import QualityError, budgets_file, execute, prepared_data
from quality.page import rewrite, tables
from quality.results import assemble, beside, load, save, seeds_of, write_json
from quality.run_spec import RunSpec
from quality.tasks import DEFAULT_TASKS, RECALL, STUDIES, describe, study_of

QUICK_ARMS, QUICK_STEPS, QUICK_SHARE = (DENSE, FIXED), 380, 0.2
WELL_ABOVE_CHANCE = 4.0
"""Times the accuracy of a guess, that dense attention must reach."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(list(sys.argv[1:] if argv is None else argv))
    if options.page is not None:
        rewrite(options.page, options.json)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        try:
            table = run_all(options, directory)
        except QualityError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(*tables(table), sep="\n\n")
    return verdict(table) if options.quick else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; --quick changes the defaults of some."""
    parser = argparse.ArgumentParser(
        prog="quality.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    tasks = [task.name for study in STUDIES.values() for task in study.tasks]
    add("--quick", action="store_true", help="a small run; fails unless dense learns")
    add("--json", type=Path, metavar="FILE", help="write or update the table")
    add("--arms", nargs="+", choices=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    add("--tasks", nargs="+", choices=tasks, help=f"default: {' '.join(DEFAULT_TASKS)}")
    add("--finished", action="store_true", help="table of what has finished; trains nothing")
    add("--seeds", nargs="+", type=int, help="default: 0 1 2")
    add("--steps", type=int, help="of every run; default: what each model needs")
    add("--beside", type=Path, metavar="TABLE", help="an earlier --json, whose runs are kept")
    add("--directory", type=Path, help="keeps data and finished runs; default: a temporary one")
    add("--page", type=Path, help="rewrite this page's tables from --json, and stop")
    options = parser.parse_args(argv)
    if options.page is not None and options.json is None:
        parser.error("--page needs --json, which it is made of")
    if options.beside is not None and not options.beside.exists():
        parser.error(f"--beside {options.beside}: no such file")
    if options.steps is not None and options.steps < 4:
        parser.error(f"--steps {options.steps}: must be at least 4")
    quick = options.quick
    options.arms = options.arms or list(QUICK_ARMS if quick else USUAL_ARMS)
    options.tasks = options.tasks or ([RECALL.name] if quick else list(DEFAULT_TASKS))
    options.seeds = options.seeds or ([0] if quick else [0, 1, 2])
    options.steps = options.steps or (QUICK_STEPS if quick else None)
    return options


def run_all(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train and score whatever is missing; gives the table."""
    earlier = _earlier(options)
    specs = lacking(list(planned_runs(options, directory.resolve())), earlier["tasks"])
    finished: list[tuple[RunSpec, dict[str, Any]]] = []
    table: dict[str, Any] = earlier["tasks"]
    for number, spec in enumerate(specs):
        found = load(spec)
        what = f"[{number + 1}/{len(specs)}] {spec.study_name} {spec.arm_name} seed {spec.seed}"
        if found is None and options.finished:
            continue
        if found is None:
            began_s = time.monotonic()
            study = spec.study
            data = prepared_data(study, spec.seed, spec.steps, directory.resolve())
            found = execute(replace(spec, data=str(data)))
            save(spec, found)
            what += f": {time.monotonic() - began_s:.0f} s, {found['cpu_seconds']:.0f} s of CPU"
        finished.append((spec, found))
        table = assemble(finished, options.tasks)
        print(f"{what}; {_in_short(table, spec)}", flush=True)
        if options.json is not None:
            write_json(options.json, _file(options, beside(table, earlier["tasks"]), earlier))
    everything = beside(table, earlier["tasks"])
    if options.json is not None and not specs:
        write_json(options.json, _file(options, everything, earlier))
    return everything


def lacking(specs: Sequence[RunSpec], table: Mapping[str, Any]) -> list[RunSpec]:
    """Runs that a table lacks, and those whose budgets they replay."""
    known = seeds_of(table)
    absent = [each for each in specs if each.seed not in known.get(_study_and_arm(each), ())]
    replayed = {(each.study_name, each.arm.replays, each.seed) for each in absent}
    return [
        each for each in specs if each in absent or (*_study_and_arm(each), each.seed) in replayed
    ]


def _study_and_arm(spec: RunSpec) -> tuple[str, str]:
    return spec.study_name, spec.arm_name


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The table of --beside, or an empty one.

    Raises:
        QualityError: its models are others.
    """
    if options.beside is None:
        return {"tasks": {}, "settings": {"seeds": []}, "machine": {}}
    earlier: dict[str, Any] = json.loads(options.beside.read_text(encoding="utf-8"))
    asked = _studies(options)
    for name, study in earlier["settings"]["studies"].items():
        if study != asked.get(name, study) or earlier["quick"] != options.quick:
            raise QualityError(
                f"--beside {options.beside}: its models of {name} were trained otherwise; "
                f"{study} there, {asked.get(name)} here"
            )
    return earlier


def planned_runs(options: argparse.Namespace, directory: Path) -> Iterator[RunSpec]:
    """Seed by seed, arm by arm."""
    studies = {study_of(task).name: study_of(task) for task in options.tasks}
    for seed in options.seeds:
        for arm in in_order(options.arms):
            for study in studies.values():
                spec = RunSpec(
                    study_name=study.name,
                    arm_name=arm.name,
                    seed=seed,
                    steps=options.steps or study.steps,
                    share=QUICK_SHARE if options.quick else 1.0,
                    data="",
                    directory=str(directory / f"{study.name}_{arm.name}_{seed}"),
                )
                if arm.replays is not None:
                    other = directory / f"{study.name}_{arm.replays}_{seed}"
                    replayed = budgets_file(replace(spec, directory=str(other)))
                    spec = replace(spec, replay=str(replayed))
                yield spec


def verdict(table: dict[str, Any]) -> int:
    """Whether dense attention has learnt to recall; 1 and a line if it has not."""
    if DENSE not in table.get(RECALL.name, {}):
        return 0
    accuracy, least = table[RECALL.name][DENSE]["accuracy"][-1], WELL_ABOVE_CHANCE * RECALL.chance
    if accuracy >= least:
        return 0
    print(f"error: dense attention recalls {accuracy:.1%}, less than {least:.1%}", file=sys.stderr)
    return 1


def _in_short(table: dict[str, Any], spec: RunSpec) -> str:
    """The run's scores."""
    parts = []
    for task in spec.study.tasks:
        if task.name in table:
            arm = table[task.name][spec.arm_name]
            parts.append(
                f"{task.name} {arm['accuracy'][-1]:.3f}, loss {arm['loss'][-1]:.4f} "
                f"(dense {arm['loss_dense'][-1]:.4f})"
            )
    figures = table.get(spec.study.tasks[0].name, {}).get(spec.arm_name)
    if figures and figures["budget_mean"][-1] is not None:
        parts.append(
            f"budgets {figures['budget_mean'][-1]:.2f} ± {figures['budget_deviation'][-1]:.2f}, "
            f"work {figures['work_ratio'][-1]:.3f}"
        )
    return "; ".join(parts)


def _file(
    options: argparse.Namespace, table: dict[str, Any], earlier: dict[str, Any]
) -> dict[str, Any]:
    return {
        "benchmark": "quality",
        "quick": options.quick,
        "tasks": table,
        "machine": _both_machines(earlier["machine"], machine("cpu")),
        "settings": {
            "seeds": sorted({*earlier["settings"]["seeds"], *options.seeds}),
            "studies": earlier["settings"].get("studies", {}) | _studies(options),
        },
    }


def _both_machines(earlier: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """The machine of these runs, with processors and versions of earlier runs before its own."""
    texts = {
        key: " and ".join(
            dict.fromkeys([*filter(None, earlier.get(key, "").split(" and ")), value])
        )
        for key, value in here.items()
        if isinstance(value, str)
    }
    return here | texts


def _studies(options: argparse.Namespace) -> dict[str, Any]:
    studies = {study_of(task).name: study_of(task) for task in options.tasks}
    return {
        name: describe(study) | {"steps": options.steps or study.steps}
        for name, study in studies.items()
    }
