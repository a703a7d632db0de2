# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: the plugin's entry point with an arm's hooks, then scores of what it trained.

    python -m quality.rank SPEC

Leaves ``rank<R>.json`` and ``rank<R>.npz`` in the run's directory.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np

from quality.run_spec import RunSpec
from quality.tasks import held_out_documents


def main(argv: list[str]) -> None:
    spec = RunSpec.read(argv[0])
    rank = int(os.environ["RANK"])
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    hooks = train(spec)
    trained = {
        "seconds": time.perf_counter() - began_s,
        "cpu_seconds": time.process_time() - began_cpu_s,
    }
    found = trained | score(spec, hooks, rank)
    np.savez_compressed(
        spec.folder / f"rank{rank}.npz",
        executed_TLS=hooks.scheduler.executed_TLS,
        lengths_TS=hooks.scheduler.lengths_TS,
    )
    (spec.folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def train(spec: RunSpec) -> Any:
    """Train in Megatron's own loop; gives the hooks, which hold the model."""
    from sparsebalance_megatron.megatron import cpu

    cpu.install()
    from quality.arm_session import ArmHooks
    from sparsebalance_megatron import pretrain_gpt
    from sparsebalance_megatron.run import training_hooks

    made: list[ArmHooks] = []

    def hooks(*arguments: Any) -> ArmHooks:
        made.append(ArmHooks(spec, *arguments))
        return made[0]

    vars(training_hooks)["TrainingHooks"] = hooks
    flags = spec.flags()
    sys.argv = [sys.argv[0], *flags]
    pretrain_gpt.main(flags)
    return made[0]


def score(spec: RunSpec, hooks: Any, rank: int) -> dict[str, Any]:
    """This rank's share of every task: sums for ranks to be added."""
    from quality.scoring import Evaluation, tally, tally_by_length

    study = spec.study
    hooks.average.put_into(hooks.model)
    hooks.model.eval()
    evaluation = Evaluation(
        model=hooks.model,
        block_size=study.block_size,
        layers=study.layers,
        longest_tokens=study.longest_tokens,
    )
    began_s = time.perf_counter()
    tasks: dict[str, Any] = {}
    for task in study.tasks:
        documents = held_out_documents(study, task, spec.seed, spec.share)[rank :: spec.ranks]
        rows = {
            name: list(evaluation.rows(documents, budget)) for name, budget in spec.readings.items()
        }
        tasks[task.name] = {name: tally(found, task.edges).sums() for name, found in rows.items()}
        tasks[task.name]["own_by_length"] = tally_by_length(rows["own"], study.length_edges).sums()
    return {"tasks": tasks, "scoring_seconds": time.perf_counter() - began_s}


if __name__ == "__main__":
    main(sys.argv[1:])
