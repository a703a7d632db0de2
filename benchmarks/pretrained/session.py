# SPDX-License-Identifier: Apache-2.0
"""Reads groups of documents by arms, whatever of it is not yet on disk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrained import arms, measures, results
from pretrained.arms import ALL, HALF, HALF_FP8, Arm
from pretrained.block_scores import Projection, digest_of
from pretrained.budgets import layer_budgets
from pretrained.documents import Document, Group, digest
from pretrained.predicted import predicted_ms
from pretrained.reading import Reader, Scores
from pretrained.rules import EXPERIMENTS, rule_of
from pretrained.wishes import WishRule
from sparsebalance_megatron.layer_budgets import DENSE


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all groups are read with.

    Attributes:
        reference: what arms are compared with, document by document.
        window: whether the window is read, without which no token is far.
        projections: by documents' tokens and by layer, where an arm scores half of the channels.
    """

    reader: Reader
    files: results.ScoreFiles
    sensitivities: Mapping[str, Any]
    reference: Arm = arms.REFERENCE
    window: bool = True
    projections: Mapping[int, Sequence[Projection]] = field(default_factory=dict)

    def read(
        self, group: Group, documents: Sequence[Document], chosen: Sequence[Arm]
    ) -> dict[str, Any]:
        """Read documents by all arms; their figures."""
        compared = (arms.DENSE_ARM, *([arms.WINDOW] if self.window else []), self.reference)
        chosen = tuple(dict.fromkeys(arm.name for arm in (*compared, *chosen)))
        chosen_arms = [arms.parse_arm(name) for name in chosen]
        most = -(-group.tokens // group.block_size)
        budgets = {
            arm.name: (DENSE,) * self.reader.layers
            if arm.selection == arms.ALL
            else layer_budgets(arm, self.reader.layers, most, self.sensitivities)
            for arm in chosen_arms
        }

        def kept(document: Document, arm: Arm) -> Path:
            projected = arm.wishes is not None and arm.wishes.scores in (HALF, HALF_FP8)
            other = digest_of(self.projections.get(group.tokens, ())) if projected else ""
            return self.files.path(
                *(document, arm.name, budgets[arm.name], group.block_size), depends_on=other
            )

        found: dict[str, list[_Found]] = {arm.name: [] for arm in chosen_arms}
        for document in documents:
            for arm in chosen_arms:
                path = kept(document, arm)
                stored = self.files.load(path)
                if stored is None:
                    began_s = time.process_time()
                    got = self._scores(document, arm, budgets[arm.name], group.block_size)
                    stored = got, time.process_time() - began_s
                    self.files.save(path, *stored)
                found[arm.name].append(_Found(*stored))
            spent = sum(each.cpu_seconds for some in found.values() for each in some)
            print(f"{document.name}: {spent:.0f} s of CPU for the group so far", flush=True)
        dense = [each.scores for each in found[arms.DENSE_ARM.name]]
        window = [each.scores for each in found[arms.WINDOW.name]] if self.window else None
        figures = {
            name: [
                measures.figures(
                    document, each.scores, dense[number], window[number] if window else None
                )
                for number, (document, each) in enumerate(zip(documents, some, strict=True))
            ]
            for name, some in found.items()
        }
        reference = figures[self.reference.name]
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
                    "cpu_seconds": round(sum(each.cpu_seconds for each in found[arm.name]), 1),
                    "figures": results.summarised(figures[arm.name], reference),
                }
                | _wishes(arm, budgets[arm.name], [each.scores for each in found[arm.name]])
                for arm in chosen_arms
            },
        }

    def _scores(
        self, document: Document, arm: Arm, budgets: tuple[int, ...], block_size: int
    ) -> Scores:
        """Read a document by an arm."""
        if arm.selection == ALL:
            return self.reader.dense(document)
        if arm.wishes is not None:
            projections = self.projections.get(document.length)
            wishes = WishRule(arm=arm, budgets=budgets, projections=projections)
            scores = self.reader.by_rule(document, block_size, wishes)
            return replace(scores, wished=wishes.wished)
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


def _wishes(arm: Arm, budgets: Sequence[int], scores: Sequence[Scores]) -> dict[str, Any]:
    """What wishes added, and the time that the arm is predicted to take; where they are known."""
    found = results.wishes_of(scores)
    wishes_L = found["wishes"]["by_layer"] if found else []
    predicted = predicted_ms(arm, budgets, wishes_L)
    return found if predicted is None else found | {"predicted_ms": round(predicted, 2)}


@dataclass(frozen=True)
class _Found:
    scores: Scores
    cpu_seconds: float
