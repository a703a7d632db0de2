# SPDX-License-Identifier: Apache-2.0
"""Scores on disk, and what is made of them: means over documents, their intervals, a table."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality.intervals import Interval, interval

from pretrained.budgets import CUTS_LOOKUPS
from pretrained.documents import Document, digest
from pretrained.measures import DIGITS, EXACT, FAR, LOSS, NATS
from pretrained.reading import Scores, Wished

_SHOWN = (EXACT, DIGITS, NATS, LOSS, FAR)


class ScoreFiles:
    """Scores of documents, by everything that they depend on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(
        self,
        document: Document,
        arm: str,
        budgets: Sequence[int],
        block_size: int,
        *,
        depends_on: str = "",
    ) -> Path:
        """Where they are kept; ``depends_on`` names what else they follow from."""
        key = [digest([document]), document.tail, arm, list(budgets), block_size]
        key += [depends_on] if depends_on else []
        return self._directory / f"{sha256(json.dumps(key).encode()).hexdigest()[:24]}.npz"

    @staticmethod
    def load(path: Path) -> tuple[Scores, float] | None:
        """Scores and the CPU seconds that they took; None where there are none."""
        if not path.exists():
            return None
        with np.load(path) as stored:
            wished = None
            if "wishes" in stored:
                wished = Wished(
                    wishes_L=tuple(stored["wishes"].tolist()),
                    read_L=tuple(stored["read"].tolist()),
                    cut=int(stored["cut"]),
                )
            scores = Scores(
                loss_X=torch.from_numpy(stored["loss"]),
                right_X=torch.from_numpy(stored["right"]),
                wished=wished,
            )
            return scores, float(stored["cpu_seconds"])

    @staticmethod
    def save(path: Path, scores: Scores, cpu_seconds: float) -> None:
        """The whole file or nothing; other processes may write beside this one."""
        partial = path.with_suffix(f".{os.getpid()}.npz")
        wished = scores.wished
        counts = {}
        if wished is not None:
            counts = {"wishes": wished.wishes_L, "read": wished.read_L, "cut": wished.cut}
        np.savez(
            partial,
            loss=scores.loss_X.numpy(),
            right=scores.right_X.numpy(),
            cpu_seconds=cpu_seconds,
            **{name: np.asarray(each) for name, each in counts.items()},
        )
        os.replace(partial, path)


def wishes_of(scores: Sequence[Scores]) -> dict[str, Any]:
    """What wishes added, over documents, under ``wishes``; nothing where there are none.

    ``by_layer``: entries a tile, or a token and head that wishes; ``most_of_a_document`` and
    ``read`` (blocks that a token reads, list and wishes) are means over layers; ``cut``: the sum.
    """
    known = [each.wished for each in scores if each.wished is not None]
    if not known:
        return {}
    by_layer = np.mean([each.wishes_L for each in known], 0)
    return {
        "wishes": {
            "mean": float(by_layer.mean()),
            "by_layer": [round(each, 4) for each in by_layer.tolist()],
            "most_of_a_document": float(max(np.mean(each.wishes_L) for each in known)),
            "read": float(np.mean([each.read_L for each in known])),
            "cut": sum(each.cut for each in known),
        }
    }


def summarised(
    values: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """``{figure: {mean, half_width, values, difference}}`` over documents.

    ``difference`` is that to the reference, document by document. A half width of one document
    alone is None.
    """
    found: dict[str, Any] = {}
    for figure in values[0]:
        mine = [each[figure] for each in values]
        found[figure] = _plain(interval(mine)) | {"values": mine}
        if figure in reference[0]:
            theirs = [each[figure] for each in reference]
            differences = [one - other for one, other in zip(mine, theirs, strict=True)]
            found[figure]["difference"] = _plain(interval(differences))
    return found


def _plain(each: Interval) -> dict[str, float | None]:
    return {
        "mean": each.mean,
        "half_width": None if math.isnan(each.half_width) else each.half_width,
    }


def agreement(sensitivities: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Correlations over layers with what cuts cost look-ups: ``r``, by ``rank``, and how many of
    the four most sensitive layers are ``common``.

    Of all other sensitivities that were measured.
    """
    from scipy.stats import spearmanr

    if CUTS_LOOKUPS not in sensitivities:
        return {}
    others = {name: each for name, each in sensitivities.items() if name != CUTS_LOOKUPS}
    goal = sensitivities[CUTS_LOOKUPS]
    return {
        name: {
            "r": float(np.corrcoef(each, goal)[0, 1]),
            "rank": float(spearmanr(each, goal).statistic),
            "common": len(_most_sensitive(each) & _most_sensitive(goal)),
        }
        for name, each in others.items()
    }


def _most_sensitive(values: Sequence[float]) -> set[int]:
    return {int(each) for each in np.argsort(values)[-4:]}


def table(groups: Mapping[str, Any]) -> str:
    """Every group's arms: predicted cost, figures, and differences to the reference."""
    lines = []
    for name, group in groups.items():
        lines += [f"{name}: {group['documents']} documents, blocks of {group['block_size']} tokens"]
        width = max(map(len, group["arms"]))
        for arm, found in group["arms"].items():
            cells = [f"{arm:{width}}  cost {found['cost']:>5.1f}"]
            if "wishes" in found:
                wishes = found["wishes"]
                cells.append(f"wishes {wishes['mean']:.2f} cut {wishes['cut']}")
            if "predicted_ms" in found:
                cells.append(f"{found['predicted_ms']:>5.1f} ms")
            for figure in _SHOWN:
                if figure in found["figures"]:
                    cells.append(_cell(figure, found["figures"][figure]))
            lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def _cell(figure: str, found: Mapping[str, Any]) -> str:
    def text(each: Mapping[str, Any], sign: str) -> str:
        half = "" if each["half_width"] is None else f" ± {each['half_width']:.3f}"
        return f"{each['mean']:{sign}.3f}{half}"

    difference = f" ({text(found['difference'], '+')})" if "difference" in found else ""
    return f"{figure} {text(found, '')}{difference}"
