# SPDX-License-Identifier: Apache-2.0
"""Reads groups of documents by arms, whatever of it is not yet on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pretrained import arms, measures, results
from pretrained.arms import ALL, Arm
from pretrained.budgets import layer_budgets
from pretrained.documents import Document, Group, digest
from pretrained.reading import Reader, Scores
from pretrained.rules import EXPERIMENTS, rule_of
from sparsebalance_megatron.layer_budgets import DENSE


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all groups are read with."""

    reader: Reader
    files: results.ScoreFiles
    sensitivities: Mapping[str, Any]
    finished_only: bool = False

    def read(
        self, group: Group, documents: Sequence[Document], chosen: Sequence[Arm]
    ) -> dict[str, Any] | None:
        """Read documents by all arms; their figures.

        With ``finished_only`` of the first documents that all arms have read already; None where
        there is no such document.
        """

        chosen = tuple(
            dict.fromkeys(
                arm.name for arm in (arms.DENSE_ARM, arms.WINDOW, arms.REFERENCE, *chosen)
            )
        )
        chosen_arms = [arms.parse_arm(name) for name in chosen]
        most = -(-group.tokens // group.block_size)
        budgets = {
            arm.name: (DENSE,) * self.reader.layers
            if arm.selection == arms.ALL
            else layer_budgets(arm, self.reader.layers, most, self.sensitivities)
            for arm in chosen_arms
        }
        figures: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in chosen_arms}
        cpu_seconds = dict.fromkeys(figures, 0.0)
        if self.finished_only:
            documents = list(
                takewhile(lambda each: self._is_finished(each, budgets, group), documents)
            )
        if not documents:
            return None
        for document in documents:
            scores: dict[str, Scores] = {}
            for arm in chosen_arms:
                path = self.files.path(document, arm.name, budgets[arm.name], group.block_size)
                found = self.files.load(path)
                if found is None:
                    began_s = time.process_time()
                    got = self._scores(document, arm, budgets[arm.name], group.block_size)
                    found = got, time.process_time() - began_s
                    self.files.save(path, *found)
                scores[arm.name], spent_s = found
                cpu_seconds[arm.name] += spent_s
            for arm in chosen_arms:
                figures[arm.name].append(
                    measures.figures(
                        document,
                        scores[arm.name],
                        scores[arms.DENSE_ARM.name],
                        scores[arms.WINDOW.name],
                    )
                )
            spent = sum(cpu_seconds.values())
            print(f"{document.name}: {spent:.0f} s of CPU for the group so far", flush=True)
        reference = figures[arms.REFERENCE.name]
        return {
            "documents": len(documents),
            "block_size": group.block_size,
            "digest": digest(documents),
            "arms": {
                arm.name: {
                    "cost": arms.predicted_cost(
                        arm, budgets[arm.name], group.tokens, group.block_size
                    ),
                    "budgets": [None if each == DENSE else each for each in budgets[arm.name]],
                    "cpu_seconds": round(cpu_seconds[arm.name], 1),
                    "figures": results.summarised(figures[arm.name], reference),
                }
                for arm in chosen_arms
            },
        }

    def _is_finished(
        self, document: Document, budgets: Mapping[str, Sequence[int]], group: Group
    ) -> bool:
        return all(
            self.files.path(document, arm, each, group.block_size).exists()
            for arm, each in budgets.items()
        )

    def _scores(
        self, document: Document, arm: Arm, budgets: tuple[int, ...], block_size: int
    ) -> Scores:
        """Read a document by an arm."""
        if arm.selection == ALL:
            return self.reader.dense(document)
        if arm.selection in EXPERIMENTS:
            rule = rule_of(arm.selection, budgets, arm.first_blocks)
            return self.reader.by_rule(document, block_size, rule)
        return self.reader.product(
            document,
            block_size=block_size,
            selection=arm.selection,
            budgets=budgets,
            sparse_init_block=arm.first_blocks,
        )
