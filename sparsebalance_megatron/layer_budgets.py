# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer: the text of the flag, and from it one number for every layer."""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby

from sparsebalance_megatron.errors import ConfigError

MAX_BLOCKS = 2**24
"""Largest budget: beyond any document, and far from where 32-bit indices of blocks overflow."""
DENSE = MAX_BLOCKS + 1
"""Stands for the budget of a dense layer, whose queries read all visible blocks, unranked."""

ALL_DENSE = "dense:all"
"""Base budgets of mode exact."""
OTHERS = -1
"""Stands for the layers that are not named: the word ``all``."""

FLAG = "--sparse-balance-layer-budgets"
_LAYERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_BLOCKS = re.compile(r"\d{1,8}", re.ASCII)


@lru_cache(maxsize=8)
def parse_layer_budgets(text: str) -> Mapping[int, int]:
    """Layer, from 0, or :data:`OTHERS` -> base budget in blocks, or :data:`DENSE`.

    >>> dict(parse_layer_budgets("16:2 8:0,3-4"))
    {2: 16, 0: 8, 3: 8, 4: 8}
    >>> dict(parse_layer_budgets("dense:all")) == {OTHERS: DENSE}
    True

    Raises:
        ConfigError: a part is wrong, or a layer is named twice.
    """
    budgets: dict[int, int] = {}
    for part in text.split():
        word, _, layers = part.partition(":")
        blocks = DENSE if word == "dense" else int(word) if _BLOCKS.fullmatch(word) else 0
        if word != "dense" and not 1 <= blocks <= MAX_BLOCKS:
            raise ConfigError(
                f"{FLAG} {part[:40]}: must begin with dense, or with 1 to {MAX_BLOCKS} blocks, and "
                "a colon"
            )
        for piece in layers.split(","):
            found = _LAYERS.fullmatch(piece)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, OTHERS)
            if piece == "all":
                first = last = OTHERS
            if last < first:
                raise ConfigError(
                    f"{FLAG} {part[:40]}: must name layers, from 0, after the colon, such as 0-3,7 "
                    "or all"
                )
            for layer in range(first, last + 1):
                if layer in budgets:
                    what = "all" if layer == OTHERS else f"layer {layer}"
                    raise ConfigError(f"{FLAG} {part[:40]}: {what} is named twice; once")
                budgets[layer] = blocks
    if not budgets:
        raise ConfigError(f"{FLAG} {text!r}: names no layers; name some, or drop the flag")
    return budgets


def layer_budgets_text(budgets: Mapping[int, int]) -> str:
    """Text of these budgets for :func:`parse_layer_budgets`; equal texts for equal budgets."""
    ranges: dict[int, list[str]] = {}
    # Neighbours keep their distance to their places among the layers that are named.
    numbered = enumerate(sorted(item for item in budgets.items() if item[0] != OTHERS))
    for (_, blocks), run in groupby(numbered, lambda each: (each[1][0] - each[0], each[1][1])):
        first, *rest = (layer for _, (layer, _) in run)
        ranges.setdefault(blocks, []).append(f"{first}-{rest[-1]}" if rest else str(first))
    if OTHERS in budgets:
        ranges.setdefault(budgets[OTHERS], []).append("all")
    words = {blocks: "dense" if blocks == DENSE else str(blocks) for blocks in ranges}
    return " ".join(f"{words[blocks]}:{','.join(found)}" for blocks, found in ranges.items())


@lru_cache(maxsize=8)
def base_budgets(base_budget: int, layer_budgets: str | None, layers: int) -> tuple[int, ...]:
    """Base budget of every layer of a model, in blocks, :data:`DENSE` where a layer is dense:
    ``base_budget`` where ``layer_budgets`` does not give another.

    Raises:
        ConfigError: a named layer is not one of the model's.
    """
    named = {} if layer_budgets is None else parse_layer_budgets(layer_budgets)
    if named and max(named) >= layers:
        raise ConfigError(
            f"{FLAG} {layer_budgets}: names layer {max(named)}; the model's layers are 0 to "
            f"{layers - 1}"
        )
    others = named.get(OTHERS, base_budget)
    return tuple(named.get(layer, others) for layer in range(layers))


def check_first_blocks(given: str, first_blocks: int | None, budgets: Mapping[int, str]) -> None:
    """Refuse first blocks, ``given`` so, that one of the budgets, with what gives it, does not hold
    beside a query's own. A budget of 1 leaves out the one that selections read by default."""
    for budget, named in budgets.items():
        if (first_blocks or 0) >= max(budget, 2):
            raise ConfigError(
                f"{given} {first_blocks}: a query reads them and its own block within its budget, "
                f"{budget} by {named}; lower the one or raise the other"
            )


def dense_up_to_blocks(budget: int, base_budget: int, tokens: int, block_size: int) -> int:
    """The longest document that a layer attends to densely: one that its budget covers, or of up
    to so many tokens where its budget is the base budget, else in proportion to it."""
    return max(budget, -(-tokens // block_size) * budget // base_budget)


def has_dense_layers(layer_budgets: str | None) -> bool:
    """Whether some layer is dense."""
    return layer_budgets is not None and DENSE in parse_layer_budgets(layer_budgets).values()
