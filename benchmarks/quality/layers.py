# SPDX-License-Identifier: Apache-2.0
"""Budgets by layer in training: six layers that look up, at equal block pairs.

    PYTHONPATH=benchmarks python -m quality.layers --json RESULT.json --seeds 0 1 2 3 4

Of every seed one model learns look-ups densely, then goes on from there with sparse attention at
budgets that are alike, by coverage, or by sensitivity, by the rule of
``--sparse-balance-sensitivity``. What its layers need is measured where it turns sparse. It is a
Llama of ``transformers`` that attends through ``evaluate``: Megatron's own loop takes several times
as long for so small a model. Seeds that the file has are not trained again.

Shape legend: B documents of a batch, T their tokens, X labels that count, W words, L layers, K
budgets.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from end_to_end.command import machine
from pretrained.documents import Document as ReadDocument
from pretrained.reading import Asked, Reader
from pretrained.sensitivities import repetitions
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from quality.intervals import interval
from quality.lookup import Lookup
from quality.masked_attention import masked_attention
from quality.results import write_json
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK
from sparsebalance_megatron.evaluate import attention
from sparsebalance_megatron.layer_budgets import DENSE as LAYER_DENSE
from sparsebalance_megatron.plan.budgets.by_layer import budgets_by_sensitivity, pairs_by_budget

SELECTION = "token-query-head"
ALIKE, COVERAGE, SENSITIVITY = "alike", "coverage", "sensitivity"
_HELD_OUT, _MEASURED = 64, 8
"""Documents that are scored, and that layers are measured on."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a seed's models are trained.

    ``stages``: documents' tokens and how many steps, dense. ``sparse_steps``: from there on, at
    the last length. ``step_tokens``: of a batch.
    """

    lookup: Lookup
    stages: tuple[tuple[int, int], ...]
    sparse_steps: int
    step_tokens: int = 1024
    learning_rate: float = 3e-3
    sparse_learning_rate: float = 1e-3
    layers: int = 6
    width: int = 64
    heads: int = 4
    block_size: int = 16
    base_budget: int = 4

    @property
    def tokens(self) -> int:
        return self.stages[-1][0]

    @property
    def pairs_K(self) -> np.ndarray:
        """Block pairs of a document in a layer at 0, 1, ... blocks."""
        blocks = np.array([self.tokens / self.block_size])
        return pairs_by_budget(blocks, QUERY_BLOCK)[:, 0]


SETTINGS = Training(
    lookup=Lookup(keys=8, values=8, noise=8, pairs=8, tokens_per_query=6),
    stages=((64, 200), (256, 60)),
    sparse_steps=80,
)


def make_model(settings: Training, seed: int) -> Any:
    """A model that attends densely."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.lookup.vocabulary,
            hidden_size=settings.width,
            intermediate_size=settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads // 2,
            max_position_embeddings=settings.tokens,
            initializer_range=0.04,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def batches(
    settings: Training, generator: np.random.Generator, tokens: int, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens [B, T + 1], and which labels [B, T] count."""
    lookup = replace(settings.lookup, shortest_tokens=tokens, longest_tokens=tokens)
    for _ in range(steps):
        documents = [lookup.recall(generator) for _ in range(settings.step_tokens // tokens)]
        yield (
            torch.from_numpy(np.stack([each.tokens for each in documents])),
            torch.from_numpy(np.stack([each.scored for each in documents])),
        )


def train(model: Any, found: Iterator[tuple[Tensor, Tensor]], steps: int, rate: float) -> None:
    """Train on answers alone."""
    warm_up_steps = 50
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step, (tokens_BT, scored_BT) in enumerate(found):
        warm, done = min(1.0, (step + 1) / warm_up_steps), step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
        scores(model, tokens_BT, scored_BT)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def scores(model: Any, tokens_BT: Tensor, scored_BT: Tensor) -> tuple[Tensor, float]:
    """Mean loss of the labels that count, and the share that is the best guess."""
    states = model.model(input_ids=tokens_BT[:, :-1]).last_hidden_state
    logits_XW, label_X = model.lm_head(states[scored_BT]), tokens_BT[:, 1:][scored_BT]
    accuracy = (logits_XW.argmax(-1) == label_X).float().mean()
    return cross_entropy(logits_XW, label_X), float(accuracy)


@torch.inference_mode()
def held_out(model: Any, settings: Training, seed: int) -> dict[str, float]:
    """Accuracy and loss of answers in documents that are not trained on."""
    generator = np.random.default_rng([seed, 1])
    steps = _HELD_OUT * settings.tokens // settings.step_tokens
    found = [scores(model, *each) for each in batches(settings, generator, settings.tokens, steps)]
    return {
        "accuracy": float(np.mean([accuracy for _, accuracy in found])),
        "loss": float(np.mean([float(loss) for loss, _ in found])),
    }


def layer_budgets(
    model: Any, settings: Training, seed: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Budgets by arm, of as many block pairs in total, and sensitivities of layers."""
    documents = documents_to_measure(settings, seed)
    reader = Reader(model)
    repeated_L = repetitions(reader, documents, settings.block_size)
    cut_L = cuts(model, settings, seed)
    curves_LK = coverage(reader, documents, settings.block_size)
    base = settings.base_budget
    worth_L = np.maximum(cut_L, 0.0)
    by_sensitivity = budgets_by_sensitivity(worth_L, base, settings.pairs_K, own_lists=True)
    return {
        ALIKE: [base] * settings.layers,
        COVERAGE: greedy(curves_LK, mean_blocks=base, least=2),
        SENSITIVITY: by_sensitivity.tolist(),
    }, {"cuts": cut_L, "repetitions": repeated_L}


def documents_to_measure(settings: Training, seed: int) -> list[ReadDocument]:
    """Documents that layers are measured on, and that are not scored."""
    generator = np.random.default_rng([seed, 2])
    lookup = replace(
        settings.lookup, shortest_tokens=settings.tokens, longest_tokens=settings.tokens
    )
    return [
        ReadDocument(
            kind="look-up",
            number=number,
            tokens=tuple(lookup.recall(generator).tokens.tolist()),
            scored=(),
            answers=(),
            tail=0,
        )
        for number in range(_MEASURED)
    ]


def coverage(reader: Reader, documents: Sequence[ReadDocument], block_size: int) -> np.ndarray:
    """Router coverage curves [L, K], the mean over documents."""
    selector = selector_named(SELECTION, first_blocks=1)
    curves: dict[int, list[Tensor]] = {}

    def observe(asked: Asked) -> None:
        ranking = rank_sequence(
            *(selector, asked.q_QHD, asked.k_TGD, asked.layouts.kv_layout),
            softmax_scale=asked.softmax_scale,
            max_budget=1,
            observe=True,
        )
        curves.setdefault(asked.layer, []).append(selector.coverage(ranking)[0])

    for document in documents:
        reader.observed(document, block_size, observe)
    return np.stack([torch.stack(curves[layer]).mean(0).numpy() for layer in sorted(curves)])


def greedy(curves_LK: np.ndarray, *, mean_blocks: int, least: int) -> list[int]:
    """Budgets of the greatest sum of coverage: every next block goes where it adds most."""
    layers, most = curves_LK.shape
    budgets = [least] * layers
    for _ in range(mean_blocks * layers - sum(budgets)):
        open_layers = [layer for layer in range(layers) if budgets[layer] < most]
        gains = [
            curves_LK[layer, budgets[layer]] - curves_LK[layer, budgets[layer] - 1]
            for layer in open_layers
        ]
        budgets[open_layers[int(np.argmax(gains))]] += 1
    return budgets


def cuts(model: Any, settings: Training, seed: int) -> list[float]:
    """Nats that answers lose where a layer alone reads its own block and the first."""
    generator = np.random.default_rng([seed, 2])
    steps = _MEASURED * settings.tokens // settings.step_tokens
    found = list(batches(settings, generator, settings.tokens, steps))

    def loss(budgets: list[int] | None) -> float:
        use_budgets(model, settings, budgets)
        with torch.inference_mode():
            return float(np.mean([float(scores(model, *each)[0]) for each in found]))

    whole = [LAYER_DENSE] * settings.layers
    dense = loss(None)
    nats_L = []
    for layer in range(settings.layers):
        nats_L.append(loss([*whole[:layer], 2, *whole[layer + 1 :]]) - dense)
    use_budgets(model, settings, None)
    return nats_L


def use_budgets(model: Any, settings: Training, budgets: Sequence[int] | None) -> None:
    """Read by these budgets, or everything."""
    if budgets is None:
        model.set_attn_implementation("sdpa")
    else:
        Reader(model).configure(settings.block_size, SELECTION, budgets)


def run_seed(settings: Training, seed: int) -> dict[str, Any]:
    """A dense start, and what every arm makes of it."""
    began_s = time.process_time()
    model, generator = make_model(settings, seed), np.random.default_rng([seed, 0])

    def dense_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, steps in settings.stages:
            yield from batches(settings, generator, tokens, steps)

    dense_steps = sum(steps for _, steps in settings.stages)
    train(model, dense_batches(), dense_steps, settings.learning_rate)
    found: dict[str, Any] = {"seed": seed, "start": held_out(model, settings, seed)}
    budgets, found["sensitivities"] = layer_budgets(model, settings, seed)
    found["arms"] = {}
    for arm, chosen in budgets.items():
        trained = deepcopy(model)
        use_budgets(trained, settings, chosen)
        before = held_out(trained, settings, seed)
        generator = np.random.default_rng([seed, 3])
        steps = settings.sparse_steps
        some = batches(settings, generator, settings.tokens, steps)
        train(trained, some, steps, settings.sparse_learning_rate)
        after = held_out(trained, settings, seed)
        use_budgets(trained, settings, None)
        found["arms"][arm] = {
            "budgets": chosen,
            "block_pairs": float(settings.pairs_K[chosen].sum()),
            "untrained": before,
            "trained": after,
            "trained, read dense": held_out(trained, settings, seed),
        }
        print(f"seed {seed} {arm} {chosen}: {before}, {after}", flush=True)
    found["cpu_seconds"] = time.process_time() - began_s
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means with intervals over seeds, and differences to uniform budgets, paired."""
    found: dict[str, Any] = {}
    for arm in (ALIKE, COVERAGE, SENSITIVITY):
        for reading in ("untrained", "trained", "trained, read dense"):
            for figure in ("accuracy", "loss"):
                mine, alike = (
                    [run["arms"][each][reading][figure] for run in runs] for each in (arm, ALIKE)
                )
                less = [one - other for one, other in zip(mine, alike, strict=True)]
                found.setdefault(arm, {}).setdefault(reading, {})[figure] = {
                    "mean": asdict(interval(mine)),
                    "less_alike": asdict(interval(less)),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    attention.block_sparse_attention = masked_attention  # type: ignore[assignment]
    known = json.loads(options.json.read_text("utf-8"))["runs"] if options.json.exists() else []
    for seed in options.seeds:
        if seed in [run["seed"] for run in known]:
            continue
        known.append(run_seed(SETTINGS, seed))
        result = {
            "benchmark": "quality.layers",
            "machine": machine("cpu"),
            "settings": asdict(SETTINGS),
            "summary": summary(known),
            "runs": known,
        }
        write_json(options.json, result)
        print(json.dumps(known[-1]), flush=True)


if __name__ == "__main__":
    main()
