# SPDX-License-Identifier: Apache-2.0
"""Models of several layers that learn look-ups at equal block pairs, spent on layers in three ways.

    python -m quality.layers --json RESULT.json

run in ``benchmarks/``. A model of torch's layers trains on documents of one length, in which
keys and values follow one another and are asked for at the end. After a uniform start its
sensitivities and its router coverage are measured by the package, and training goes on from there
three times: with all layers alike, with budgets of the greatest sum of coverage, and with budgets
by sensitivity. Attention reads what ``token-query-head`` selects. The models are scored on held-out
documents, at their budgets and with dense attention.

Shape legend: B documents, T tokens of a document, H heads, D head dim, N blocks, L layers, K
budgets.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from end_to_end.command import machine
from pretrained.budgets import greedy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from quality.intervals import interval
from quality.lookup import Lookup
from quality.results import write_json
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.repetitions import Repetitions
from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.cost.work_model import TOKEN_QUERY_HEAD
from sparsebalance_megatron.plan.budgets.by_layer import (
    BudgetChoices,
    budgets_by_sensitivity,
    pairs_by_budget,
)

LAYERS, WIDTH, HEADS, HEAD_DIM = 6, 64, 4, 16
BLOCK_TOKENS, BLOCKS, BASE_BUDGET = 2, 32, 6
TOKENS = BLOCK_TOKENS * BLOCKS
DOCUMENTS, STEPS, START_STEPS, WARM_UP_STEPS, LEARNING_RATE = 16, 1400, 900, 50, 3e-3
HELD_OUT, MEASURED = 768, 32
TASK = Lookup(
    **{"keys": 16, "values": 16, "pairs": 4, "stacked": False},
    **{"shortest_tokens": TOKENS, "longest_tokens": TOKENS},
)
UNIFORM, COVERAGE, SENSITIVITY = ARMS = "uniform", "coverage", "sensitivity"
Budgets = Sequence[int] | None
"""One for each layer, in blocks; None is dense attention."""


class Layer(nn.Module):
    """Attention with rotary embedding, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.last_qk: tuple[Tensor, Tensor] | None = None

    def forward(self, states: Tensor, turn: tuple[Tensor, Tensor], budget: int | None) -> Tensor:
        qkv = self.qkv(rms_norm(states, (WIDTH,))).unflatten(-1, (3, HEADS, HEAD_DIM))
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD = (_turned(x, *turn) for x in (q_BHTD, k_BHTD))
        self.last_qk = q_BHTD.detach(), k_BHTD.detach()
        mask = None if budget is None or budget >= BLOCKS else _read(q_BHTD, k_BHTD, budget)
        out = scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask=mask, is_causal=mask is None
        )
        states = states + self.out(out.transpose(1, 2).flatten(2))
        gate, up = self.up(rms_norm(states, (WIDTH,))).chunk(2, -1)
        return states + self.down(silu(gate) * up)


class Model(nn.Module):
    """Embedding, layers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TASK.vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TASK.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        angle = torch.arange(TOKENS)[:, None] * 1e4 ** (-torch.arange(0, 1, 2 / HEAD_DIM))
        self.turn = angle.cos(), angle.sin()

    def forward(self, tokens_BT: Tensor, budgets: Budgets) -> Tensor:
        states = self.embedding(tokens_BT)
        for layer, budget in zip(self.layers, budgets or [None] * LAYERS, strict=True):
            states = layer(states, self.turn, budget)
        return self.head(rms_norm(states, (WIDTH,)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


@torch.no_grad()
def _read(q_BHTD: Tensor, k_BHTD: Tensor, budget: int) -> Tensor:
    """bool [B, H, T, T]: a token's own block up to itself, and the best past blocks by query . mean
    key."""
    mean_BHND = k_BHTD.unflatten(2, (BLOCKS, BLOCK_TOKENS)).mean(3)
    score_BHTN = q_BHTD @ mean_BHND.transpose(2, 3)
    own_T1 = torch.arange(TOKENS)[:, None] // BLOCK_TOKENS
    number_N = torch.arange(BLOCKS)
    score_BHTN = score_BHTN.masked_fill(number_N >= own_T1, -torch.inf)
    best = score_BHTN.topk(budget - 1, -1)
    listed_BHTN = torch.zeros_like(score_BHTN, dtype=torch.bool)
    listed_BHTN.scatter_(-1, best.indices, best.values > -torch.inf)
    listed_BHTN |= number_N == own_T1
    past_TT = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return listed_BHTN.repeat_interleave(BLOCK_TOKENS, -1) & past_TT


def documents(generator: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, T + 1], and whether a place's next token is asked for, [B, T]."""
    found = [TASK.recall(generator) for _ in range(count)]
    tokens, scored = (
        torch.from_numpy(np.stack([getattr(each, name) for each in found]))
        for name in ("tokens", "scored")
    )
    return tokens, scored


def train(
    model: Model, optimizer: torch.optim.Optimizer, seed: int, steps: range, budgets: Budgets
) -> None:
    """Some steps; documents follow from the seed and the step."""
    for step in steps:
        tokens, scored = documents(np.random.default_rng([seed, step]), DOCUMENTS)
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * 0.5 * (1.0 + np.cos(np.pi * step / STEPS))
        logits = model(tokens[:, :-1], budgets)
        loss = cross_entropy(logits[scored], tokens[:, 1:][scored])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model: Model, seed: int, budgets: Budgets) -> float:
    """Share of held-out answers that are right."""
    tokens, scored = documents(np.random.default_rng([seed, STEPS + 1]), HELD_OUT)
    right = []
    for some, asked in zip(tokens.split(64), scored.split(64), strict=True):
        best = model(some[:, :-1], budgets).argmax(-1)
        right.append((best == some[:, 1:])[asked])
    return float(torch.cat(right).double().mean())


@torch.no_grad()
def measured(model: Model, seed: int) -> tuple[list[float], list[list[float]]]:
    """Sensitivities, and router coverage [L, K], of a model that reads densely."""
    tokens, _ = documents(np.random.default_rng([seed, STEPS]), MEASURED)
    model(tokens[:, :-1], None)
    layout = packed_layout(range(0, (MEASURED + 1) * TOKENS, TOKENS), BLOCK_TOKENS, "cpu")
    repetitions = Repetitions(LAYERS, HEADS, torch.device("cpu"))
    repetitions.tokens_T = tokens[:, :-1].flatten()
    selector, curves = selector_named("token-query-head"), []
    for number, layer in enumerate(model.layers):
        q_THD, k_THD = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in layer.last_qk)
        repetitions.add(number, q_THD, k_THD, layout, softmax_scale=HEAD_DIM**-0.5)
        ranking = selector.rank(
            q_THD,
            selector.summaries(q_THD, k_THD, layout),
            LayoutPair.within(layout),
            softmax_scale=HEAD_DIM**-0.5,
            max_budget=1,
            observe=True,
        )
        curves.append(selector.coverage(ranking).mean(0).tolist())
    return repetitions.sensitivity_L(), curves


def budgets_of(sensitivity_L: list[float], curves_LK: list[list[float]]) -> dict[str, list[int]]:
    """Budgets of the arms, none of more block pairs than the uniform ones."""
    pairs_K = pairs_by_budget(np.array([float(BLOCKS)]), TOKEN_QUERY_HEAD)
    choices = BudgetChoices.of(BASE_BUDGET, pairs_K)
    least = int(choices.budget_K[0])
    by_coverage: list[int] = []
    # The further a budget is, the fewer pairs it adds, so that more blocks may fit than in uniform
    # ones.
    for mean in range(BASE_BUDGET, BLOCKS + 1):
        some = list(greedy(curves_LK, mean_blocks=mean, least=least, most=BLOCKS))
        if pairs_K[some].sum() > LAYERS * pairs_K[BASE_BUDGET]:
            break
        by_coverage = some
    return {
        UNIFORM: [BASE_BUDGET] * LAYERS,
        COVERAGE: by_coverage,
        SENSITIVITY: budgets_by_sensitivity(np.array(sensitivity_L), choices).tolist(),
    }


def run(seed: int) -> dict[str, Any]:
    """One seed: the uniform start, and the arms from there."""
    torch.manual_seed(seed)
    start = Model()
    optimizer = torch.optim.AdamW(start.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    uniform = [BASE_BUDGET] * LAYERS
    train(start, optimizer, seed, range(START_STEPS), uniform)
    sensitivity_L, curves_LK = measured(start, seed)
    budgets = budgets_of(sensitivity_L, curves_LK)
    found: dict[str, Any] = {
        "seed": seed,
        "start": {"own": accuracy(start, seed, uniform), "dense": accuracy(start, seed, None)},
        "sensitivity": sensitivity_L,
        "coverage_of_base_budget": [curve[BASE_BUDGET - 1] for curve in curves_LK],
        "arms": {},
    }
    for arm in ARMS:
        model = copy.deepcopy(start)
        again = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, again, seed, range(START_STEPS, STEPS), budgets[arm])
        found["arms"][arm] = {
            "budgets": budgets[arm],
            "own": accuracy(model, seed, budgets[arm]),
            "uniform": accuracy(model, seed, uniform),
            "dense": accuracy(model, seed, None),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    seeds: list[dict[str, Any]] = []
    for seed in options.seeds:
        began_s = time.process_time()
        seeds.append(run(seed))
        seeds[-1]["cpu_seconds"] = round(time.process_time() - began_s, 1)
        print(json.dumps(seeds[-1]), flush=True)
        write_json(options.json, _table(seeds))
    return 0


def _table(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(arm: str) -> list[float]:
        return [each["arms"][arm]["own"] for each in seeds]

    differences = {
        f"{one} - {other}": [mine - theirs for mine, theirs in zip(of(one), of(other), strict=True)]
        for one, other in ((SENSITIVITY, UNIFORM), (COVERAGE, UNIFORM), (SENSITIVITY, COVERAGE))
    }
    return {
        "benchmark": "quality.layers",
        "machine": machine("cpu") | {"threads_per_process": 1},
        "date": date.today().isoformat(),
        "settings": {
            **{"layers": LAYERS, "width": WIDTH, "heads": HEADS, "tokens": TOKENS},
            **{"block_tokens": BLOCK_TOKENS, "base_budget": BASE_BUDGET, "steps": STEPS},
            **{"start_steps": START_STEPS, "documents": DOCUMENTS},
            **{"learning_rate": LEARNING_RATE, "held_out": HELD_OUT, "pairs": TASK.pairs},
        },
        "accuracy": {
            name: {"mean": found.mean, "half_width": found.half_width}
            for name, values in ({arm: of(arm) for arm in ARMS} | differences).items()
            for found in (interval(values),)
            if len(seeds) > 1
        },
        "seeds": list(seeds),
    }


if __name__ == "__main__":
    sys.exit(main())
