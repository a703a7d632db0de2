# SPDX-License-Identifier: Apache-2.0
"""Wishes in training: six layers that look up go on from a dense start, at equal predicted cost.

    PYTHONPATH=benchmarks:. python -m quality.wishes --json RESULT.json --seeds 0 1 2 3 4

Models, documents and dense starts are those of :mod:`.layers`. From there every arm trains as long
on the same documents. Cost: block pairs of a shared list, by token and layer, where a pair of a
token's own list counts 2.8, one of a dense layer 1, scores of half of the channels a fourteenth of
a dense layer's pairs, and an entry of a tile is a pair. At 16 blocks a dense layer costs little:
longer documents favour whole layers less. Projections are measured where the model turns sparse,
on documents that are not scored, and stay as they are. Seeds that the file has are not trained
again.

Shape legend: L layers.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from end_to_end.command import machine
from pretrained.arms import Arm, mean_blocks, parse_arm, predicted_cost
from pretrained.block_scores import Projection, measure_projections
from pretrained.reading import Reader
from pretrained.wishes import WishRule

from quality.intervals import interval
from quality.layers import (
    SETTINGS,
    Training,
    batches,
    cuts,
    documents_to_measure,
    held_out,
    make_model,
    train,
)
from quality.masked_attention import masked_attention
from quality.results import write_json
from sparsebalance_megatron.evaluate import attention
from sparsebalance_megatron.layer_budgets import DENSE

WHOLE = "whole layer"
ARMS: Mapping[str, str] = {
    "dense": "dense",
    "previous-block 4": "previous-block 4 first=1",
    "previous-block 5": "previous-block 5 first=1",
    WHOLE: "previous-block 4 first=1",
    "wishes of tiles": "previous-block 4 first=1 wishes=tile-8 scores=half",
    "wishes of tiles, exact": "previous-block 4 first=1 wishes=tile-8 scores=exact",
    "lists by token": "token-query-head 2 first=1",
}
SCORE_COST = {"exact": 1 / 7, "half": 1 / 14}
"""Of a dense layer's pairs: scores are one of its seven products."""
COMPARED = WHOLE


@dataclass(kw_only=True)
class ArmReading:
    """How an arm's model reads: its layers' budgets, and what its wishes came to."""

    arm: Arm
    budgets: tuple[int, ...]
    projections: Sequence[Projection]

    @contextmanager
    def of(self, model: Any, settings: Training) -> Iterator[WishRule | None]:
        """Within it the model reads so."""
        reader = Reader(model)
        if self.arm.wishes is not None:
            rule = WishRule(arm=self.arm, budgets=self.budgets, projections=self.projections)
            with reader.attending(settings.block_size, rule):
                yield rule
        elif set(self.budgets) == {DENSE}:
            model.set_attn_implementation("sdpa")
            yield None
        else:
            reader.configure(
                settings.block_size, self.arm.selection, self.budgets, sparse_init_block=1
            )
            yield None

    def cost(self, settings: Training, wishes: float) -> float:
        """Pairs of a shared list by token and layer."""
        found = predicted_cost(self.arm, self.budgets, settings.tokens, settings.block_size)
        if self.arm.wishes is None:
            return found
        visible = mean_blocks(DENSE, settings.tokens, settings.block_size)
        return found + wishes + SCORE_COST[self.arm.wishes.scores] * visible


def arm_readings(model: Any, settings: Training, seed: int) -> dict[str, ArmReading]:
    """Every arm's; the whole layer is the one whose cut costs most."""
    nats_L = cuts(model, settings, seed)
    others = documents_to_measure(settings, seed)
    projections = measure_projections(Reader(model), others, settings.block_size)
    found = {}
    for name, words in ARMS.items():
        arm = parse_arm(words)
        budgets = [arm.blocks or DENSE] * settings.layers
        if name == WHOLE:
            budgets[int(np.argmax(nats_L))] = DENSE
        found[name] = ArmReading(arm=arm, budgets=tuple(budgets), projections=projections)
    return found


def run_seed(settings: Training, seed: int) -> dict[str, Any]:
    """A dense start, and what every arm makes of it."""
    began_s = time.process_time()
    model, generator = make_model(settings, seed), np.random.default_rng([seed, 0])
    dense_batches = (
        batch
        for tokens, steps in settings.stages
        for batch in batches(settings, generator, tokens, steps)
    )
    dense_steps = sum(steps for _, steps in settings.stages)
    train(model, dense_batches, dense_steps, settings.learning_rate)
    found: dict[str, Any] = {"seed": seed, "start": held_out(model, settings, seed), "arms": {}}
    for name, reading in arm_readings(model, settings, seed).items():
        trained = deepcopy(model)
        with reading.of(trained, settings) as rule:
            before = held_out(trained, settings, seed)
            generator = np.random.default_rng([seed, 3])
            some = batches(settings, generator, settings.tokens, settings.sparse_steps)
            train(trained, some, settings.sparse_steps, settings.sparse_learning_rate)
            wishes = fmean(rule.wishes) if rule is not None else 0.0
            after = held_out(trained, settings, seed)
        found["arms"][name] = {
            "words": reading.arm.name,
            "budgets": [None if each == DENSE else each for each in reading.budgets],
            "cost": reading.cost(settings, wishes),
            "wishes": wishes,
            "cut": rule.cut if rule is not None else 0,
            "untrained": before,
            "trained": after,
        }
        print(f"seed {seed} {name}: {json.dumps(found['arms'][name])}", flush=True)
    found["cpu_seconds"] = time.process_time() - began_s
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means with intervals over seeds, and differences to the whole layer, paired."""
    found: dict[str, Any] = {}
    for name in ARMS:
        mine = [run["arms"][name] for run in runs]
        found[name] = {each: fmean(arm[each] for arm in mine) for each in ("cost", "wishes")}
        for reading in ("untrained", "trained"):
            for figure in ("accuracy", "loss"):
                values = [arm[reading][figure] for arm in mine]
                others = [run["arms"][COMPARED][reading][figure] for run in runs]
                less = [one - other for one, other in zip(values, others, strict=True)]
                found[name].setdefault(reading, {})[figure] = {
                    "mean": asdict(interval(values)),
                    "less_whole_layer": asdict(interval(less)),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--quick", action="store_true", help="a few steps: shows that everything runs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    attention.block_sparse_attention = masked_attention  # type: ignore[assignment]
    settings = SETTINGS
    if options.quick:
        settings = replace(settings, stages=((64, 3), (256, 3)), sparse_steps=3)
    known = json.loads(options.json.read_text("utf-8"))["runs"] if options.json.exists() else []
    for seed in options.seeds:
        if seed in [run["seed"] for run in known]:
            continue
        known.append(run_seed(settings, seed))
        result = {
            "benchmark": "quality.wishes",
            "machine": machine("cpu"),
            "settings": asdict(settings),
            "summary": summary(known),
            "runs": known,
        }
        write_json(options.json, result)


if __name__ == "__main__":
    main()
