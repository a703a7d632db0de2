# SPDX-License-Identifier: Apache-2.0
"""The tasks, and the models that learn them: several tasks may be learnt by one model."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from quality.documents import Document
from quality.lookup import DEPTHS, Lookup
from quality.source_text import LONGEST_BYTES, VOCABULARY, source_text

STACKED = Lookup()
LONG = Lookup(shortest_tokens=24, longest_tokens=384)
_NEEDLE_SHARE = 0.25
"""Share of needles among the documents that a lookup model is trained on."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is scored on.

    ``place``: what the documents' places are. ``edges``: of the intervals that places are grouped
    in. ``chance``: accuracy of a guess. ``by_loss``: whether arms are compared by losses and not by
    right answers.
    """

    name: str
    title: str
    place: str
    edges: tuple[int, ...]
    held_out: Callable[[np.random.Generator, int], Iterator[Document]]
    documents: int
    chance: float
    by_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model with the documents that it is trained on and the tasks that it is scored on.

    ``steps``: of training, unless told otherwise. ``attention_weight``: how many times as expensive
    the planner takes attention to be as counting its operations says. ``planned_ranks``:
    data-parallel ranks that steps are planned for, so that there is something to balance.
    ``equal_speed_blocks``: of a budget that all samples have, so that a planned step takes as long
    as one of the defaults; a mean over steps that alternate between the whole numbers around it.
    ``averaged_share``: of the steps, the last ones, whose weights' mean is scored; 0 scores the
    last weights. ``length_shares``: of the longest document's tokens, where intervals of length end
    by which scores are told apart.
    """

    name: str
    tasks: tuple[Task, ...]
    vocabulary: int
    longest_tokens: int
    layers: int
    block_size: int
    base_budget: int
    batch_size: int
    steps: int
    attention_weight: float
    training: Callable[[np.random.Generator], Iterator[Document]]
    planned_ranks: int = 2
    equal_speed_blocks: float = 5.6
    averaged_share: float = 0.0
    length_shares: tuple[float, ...] = (0.42, 0.56, 0.75)

    @property
    def length_edges(self) -> tuple[int, ...]:
        """Edges of four intervals of documents' tokens, nearly alike in their ratios."""
        longest = self.longest_tokens
        return (0, *(round(longest * share) for share in self.length_shares), longest + 1)


def generator_of(study: Study, purpose: str, seed: int) -> np.random.Generator:
    """A stream that depends on study, purpose and seed alone, whatever else is drawn."""
    return np.random.default_rng([seed, zlib.crc32(f"{study.name}/{purpose}".encode())])


def training_documents(study: Study, seed: int, count: int) -> Iterator[Document]:
    """What the model of a seed is trained on."""
    return islice(study.training(generator_of(study, "training", seed)), count)


def held_out_documents(study: Study, task: Task, seed: int, share: float) -> list[Document]:
    """What it is scored on; ``share`` of all that the task has."""
    generator = generator_of(study, task.name, seed)
    return list(task.held_out(generator, max(DEPTHS, round(task.documents * share))))


def _lookup_training(lookup: Lookup) -> Callable[[np.random.Generator], Iterator[Document]]:
    def documents(generator: np.random.Generator) -> Iterator[Document]:
        while True:
            if generator.random() < _NEEDLE_SHARE:
                yield lookup.needle(generator, int(generator.integers(DEPTHS)))
            else:
                yield lookup.recall(generator)

    return documents


def _recall(lookup: Lookup) -> Callable[[np.random.Generator, int], Iterator[Document]]:
    return lambda generator, count: (lookup.recall(generator) for _ in range(count))


def _needles(lookup: Lookup) -> Callable[[np.random.Generator, int], Iterator[Document]]:
    """As many at every depth."""
    return lambda generator, count: (
        lookup.needle(generator, number % DEPTHS) for number in range(count)
    )


RECALL = Task(
    name="recall",
    title="multi-query associative recall, stacked",
    place="distance in tokens",
    edges=(0, 32, 64, 128, 257),
    held_out=_recall(STACKED),
    documents=800,
    chance=STACKED.chance,
)
NEEDLE = Task(
    name="needle",
    title="a needle in noise",
    place="depth in tenths",
    edges=tuple(range(DEPTHS + 1)),
    held_out=_needles(STACKED),
    documents=1500,
    chance=STACKED.chance,
)
STEADY = tuple(
    replace(task, name=f"{task.name}-steady", documents=documents)
    for task, documents in ((RECALL, 800), (NEEDLE, 4000))
)
LONG_TASKS = tuple(
    replace(task, name=f"{task.name}-long", edges=edges, held_out=held_out(LONG), documents=count)
    for task, edges, held_out, count in (
        (RECALL, (0, 24, 48, 96, 192, 385), _recall, 800),
        (NEEDLE, NEEDLE.edges, _needles, 4000),
    )
)

LOOKUP = Study(
    name="lookup",
    tasks=(RECALL, NEEDLE),
    vocabulary=STACKED.vocabulary,
    longest_tokens=STACKED.longest_tokens,
    layers=1,
    block_size=8,
    base_budget=6,
    batch_size=16,
    steps=650,
    attention_weight=40.0,
    training=_lookup_training(STACKED),
)
LOOKUP_STEADY = replace(LOOKUP, name="lookup-steady", tasks=STEADY, averaged_share=0.2)
LOOKUP_LONG = replace(
    LOOKUP_STEADY,
    name="lookup-long",
    tasks=LONG_TASKS,
    longest_tokens=LONG.longest_tokens,
    steps=900,
    training=_lookup_training(LONG),
    planned_ranks=8,
    equal_speed_blocks=5.2,
    length_shares=(0.125, 0.25, 0.5),
)
TEXT = Study(
    name="text",
    tasks=(
        Task(
            name="text",
            title="the next byte of Python's standard library",
            place="position in the document",
            edges=(0, 256, 1024, LONGEST_BYTES + 1),
            held_out=lambda generator, count: islice(source_text(generator, held_out=True), count),
            documents=200,
            chance=1 / VOCABULARY,
            by_loss=True,
        ),
    ),
    vocabulary=VOCABULARY,
    longest_tokens=LONGEST_BYTES,
    layers=2,
    block_size=64,
    base_budget=8,
    batch_size=8,
    steps=144,
    attention_weight=1.0,
    training=partial(source_text, held_out=False),
    length_shares=(1 / 16, 1 / 4, 1 / 2),
)

STUDIES: Mapping[str, Study] = {
    study.name: study for study in (LOOKUP, LOOKUP_STEADY, LOOKUP_LONG, TEXT)
}
DEFAULT_TASKS = ("recall", "needle")


def study_of(task: str) -> Study:
    """The study that has a task of that name; raises KeyError if none has."""
    for study in STUDIES.values():
        if any(own.name == task for own in study.tasks):
            return study
    raise KeyError(task)


def describe(study: Study) -> dict[str, Any]:
    """Settings, for the result's file."""
    return {
        "tasks": [task.name for task in study.tasks],
        "layers": study.layers,
        "longest_tokens": study.longest_tokens,
        "block_size": study.block_size,
        "base_budget": study.base_budget,
        "batch_size": study.batch_size,
        "vocabulary": study.vocabulary,
        "attention_weight": study.attention_weight,
        "planned_ranks": study.planned_ranks,
        "averaged_share": study.averaged_share,
    }
