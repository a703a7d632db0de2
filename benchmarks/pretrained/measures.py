# SPDX-License-Identifier: Apache-2.0
"""Figures of one document, from the scores of its labels.

Shape legend: X scored labels.
"""

import torch
from torch import Tensor

from pretrained.documents import COPY, TEXT, Document
from pretrained.reading import Scores

LOSS, FAR = "loss over dense", "far"
EXACT, DIGITS, NATS = "exact", "digits", "nats"
_FAR_SHARE = 0.1
_QUARTERS = 4


def figures(
    document: Document, scores: Scores, dense: Scores, window: Scores | None
) -> dict[str, float]:
    """Figures of a document read in some way.

    Args:
        scores, dense, window: of all labels; where there is no window, nothing is far.

    Returns:
        Of text: ``loss over dense`` in nats a token, that of ``far`` tokens and of each
        ``quarter`` of the document. Of look-ups: the share of answers whose digits are all the
        best guess (``exact``), that of ``digits``, and ``nats`` a digit. Of copied spans the
        same, of a span and of its tokens, and ``loss over dense``.
    """
    if document.kind != TEXT:
        found = {
            EXACT: _exact(scores.right_X, torch.tensor(document.answers)),
            DIGITS: float(scores.right_X.float().mean()),
            NATS: float(scores.loss_X.mean()),
        }
        if document.kind == COPY:
            found[LOSS] = float((scores.loss_X - dense.loss_X).mean())
        return found
    over_X = scores.loss_X - dense.loss_X
    found = {LOSS: float(over_X.mean())}
    if window is not None:
        lost_X = window.loss_X - dense.loss_X
        far_labels = max(1, int(_FAR_SHARE * len(over_X)))
        found[FAR] = float(over_X[lost_X.topk(far_labels).indices].mean())
    for number, part in enumerate(over_X.chunk(_QUARTERS)):
        found[f"quarter {number + 1}"] = float(part.mean())
    return found


def _exact(right_X: Tensor, answer_X: Tensor) -> float:
    """The share of answers all of whose labels are right."""
    whole = [bool(right_X[answer_X == answer].all()) for answer in answer_X.unique()]
    return sum(whole) / len(whole)
