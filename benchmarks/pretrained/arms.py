# SPDX-License-Identifier: Apache-2.0
"""Arms: who selects, how many blocks, in which layers; and the work that this is predicted to be.

An arm is a line of words: ``token-query-head 8 first=1 layers=peaks``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pretrained.model import PretrainedError
from pretrained.rules import BY_TOKEN, EXPERIMENTS
from sparsebalance_megatron.layer_budgets import DENSE
from sparsebalance_megatron.selector_registry import BUILT_IN, default_first_blocks

TOKEN_PAIR_COST = 2.8
"""Assumed: a pair of a token's own list costs this many pairs of a list that a block of queries
shares, as on a Hopper GPU (2.6 to 2.9). A pair of a dense layer is counted as one."""
UNIFORM = "uniform"
ALL = "dense"
EXACT, HALF, FP8, HALF_FP8 = "exact", "half", "fp8", "half-fp8"
"""What wishes are scored by: whole queries and keys, half of the channels, FP8, both."""
SCORES = (EXACT, HALF, FP8, HALF_FP8)
QUERY_HEAD, KV_HEAD, TILE, WHOLE_BLOCK = "token-query-head", "token-kv-head", "tile-", "block"
GATE = 0.1
_SHORT_TOKENS, _LONGEST_TOKENS = 1024, 8192


@dataclass(frozen=True, kw_only=True)
class WishSettings:
    """Wishes beside a list that a block of queries shares; see :mod:`.wishes`.

    Attributes:
        who: ``token-query-head``, ``token-kv-head``, ``tile-16`` for tiles of 16 tokens, or
            ``tile-block``.
        scores: one of :data:`SCORES`.
        gate: the least share of a wish.
    """

    who: str
    scores: str = EXACT
    gate: float = GATE

    def __post_init__(self) -> None:
        tile = self.who.removeprefix(TILE)
        is_tile = tile != self.who and (tile.isdecimal() or tile == WHOLE_BLOCK)
        if not is_tile and self.who not in (QUERY_HEAD, KV_HEAD):
            raise PretrainedError(
                f"wishes={self.who}: must be {QUERY_HEAD}, {KV_HEAD}, {TILE}16 or another number "
                f"of tokens, or {TILE}{WHOLE_BLOCK}"
            )
        if self.scores not in SCORES:
            raise PretrainedError(f"scores={self.scores}: must be one of {', '.join(SCORES)}")

    def tile_of(self, block_size: int) -> int:
        """Tokens of a tile; 0 where tokens wish alone."""
        if not self.who.startswith(TILE):
            return 0
        tile = self.who.removeprefix(TILE)
        return block_size if tile == WHOLE_BLOCK else int(tile)

    @property
    def words(self) -> list[str]:
        return [f"wishes={self.who}", f"scores={self.scores}", f"gate={self.gate:g}"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to read.

    Attributes:
        selection: a built-in one, an experiment, or ``dense``.
        blocks: mean budget of the layers; of those that are not dense, where ``layers`` names
            dense ones.
        first_blocks: of a document, read besides the own block, within the budget.
        layers: how budgets differ by layer; see :mod:`.budgets`.
        wishes: what is read beside lists; None for nothing.
    """

    selection: str
    blocks: int = 0
    first_blocks: int = 0
    layers: str = UNIFORM
    wishes: WishSettings | None = None

    @property
    def name(self) -> str:
        """The words of the arm; :func:`parse_arm` reads them."""
        words = [self.selection]
        if self.selection != ALL:
            words += [str(self.blocks), f"first={self.first_blocks}"]
        words += [f"layers={self.layers}"] if self.layers != UNIFORM else []
        words += self.wishes.words if self.wishes is not None else []
        return " ".join(words)

    @property
    def pair_cost(self) -> float:
        """Cost of a pair of a sparse layer in pairs of a shared list."""
        by_token = self.selection in (*BY_TOKEN, "token-query-head", "token-kv-head")
        return TOKEN_PAIR_COST if by_token else 1.0


def parse_arm(text: str) -> Arm:
    """Read an arm's words.

    Raises:
        PretrainedError: one is wrong.
    """
    selection, *words = text.split()
    if selection not in (ALL, *BUILT_IN, *EXPERIMENTS):
        known = ", ".join((ALL, *BUILT_IN, *EXPERIMENTS))
        raise PretrainedError(
            f"arm {text!r}: no selection is called {selection}; there are {known}"
        )
    first_blocks = default_first_blocks(selection) if selection in BUILT_IN else 1
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        settings[name if equals else "blocks"] = value
    if unknown := settings.keys() - {"blocks", "first", "layers", "wishes", "scores", "gate"}:
        raise PretrainedError(f"arm {text!r}: nothing is called {', '.join(sorted(unknown))}")
    blocks = int(settings.get("blocks", 0))
    if selection != ALL and blocks < 2:
        raise PretrainedError(f"arm {text!r}: needs a budget of at least 2 blocks after its name")
    wishes = None
    if "wishes" in settings:
        wishes = WishSettings(
            who=settings["wishes"],
            scores=settings.get("scores", EXACT),
            gate=float(settings.get("gate", GATE)),
        )
    return Arm(
        selection=selection,
        blocks=blocks,
        first_blocks=int(settings.get("first", first_blocks)),
        layers=settings.get("layers", UNIFORM),
        wishes=wishes,
    )


def predicted_cost(arm: Arm, budgets: Sequence[int], tokens: int, block_size: int) -> float:
    """Pairs of a shared list, by layer and token, that take as long as the arm; wholly sparse."""
    cost = 0.0
    for budget in budgets:
        read = mean_blocks(budget, tokens, block_size)
        cost += read * (1.0 if budget == DENSE else arm.pair_cost)
    return cost / len(budgets)


def mean_blocks(budget: int, tokens: int, block_size: int) -> float:
    """Blocks that a token reads, the mean over a document's tokens."""
    blocks = -(-tokens // block_size)
    return sum(min(budget, visible) for visible in range(1, blocks + 1)) / blocks


REFERENCE = parse_arm("token-query-head 8 first=1")
"""What arms are compared with, document by document."""
WINDOW = parse_arm("window 9 first=1")
"""Far tokens are those that lose most to it."""
DENSE_ARM = Arm(selection=ALL)

_EQUAL_BLOCKS = """
    token-query-head 8 first=1
    window 9 first=1
    token-query-head 8 first=0
    token-kv-head 8 first=1
    token-kv-head 8 first=0
    previous-block 8 first=1
    previous-block 8 first=0
    vertical-slash 8
    oracle-token 8 first=1
    oracle-block 8 first=1
    token-query-head 8 first=1 layers=peaks
    token-query-head 8 first=1 layers=cuts-text
    token-query-head 8 first=1 layers=cuts-lookups
    previous-block 8 first=1 layers=peaks
    previous-block 8 first=1 layers=cuts-lookups
"""
_EQUAL_TIME = """
    token-query-head 3 first=1
    previous-block 22 first=1
    vertical-slash 22
    previous-block 22 first=1 layers=peaks
    previous-block 8 first=1 layers=dense-4-peaks
    previous-block 8 first=1 layers=dense-4-cuts-lookups
    token-query-head 8 first=1 layers=dense-4-peaks
"""
_LONGER = """
    token-query-head 8 first=1
    window 9 first=1
    token-query-head 8 first=0
    previous-block 8 first=1
    oracle-token 8 first=1
    oracle-block 8 first=1
    token-query-head 8 first=1 layers=peaks
    token-query-head 8 first=1 layers=cuts-lookups
    previous-block 22 first=1
    previous-block 22 first=1 layers=peaks
    previous-block 8 first=1 layers=dense-4-peaks
"""
_LONGEST = """
    token-query-head 8 first=1
    window 9 first=1
    token-query-head 8 first=0
    token-query-head 8 first=1 layers=peaks
    previous-block 22 first=1
"""
_WHOLE = "previous-block 8 first=1 layers=dense:7,8,17,18"
"""The four layers that look up; see research/pretrained.md."""
_WISHES = """
    previous-block 8 first=1
    previous-block 8 first=1 wishes=tile-16 scores=exact
    previous-block 8 first=1 wishes=tile-16 scores=fp8
    previous-block 8 first=1 wishes=tile-16 scores=half
    previous-block 8 first=1 wishes=tile-16 scores=half-fp8
    previous-block 8 first=1 wishes=token-query-head
    previous-block 8 first=1 wishes=token-kv-head gate=0.05
    previous-block 4 first=1
    previous-block 4 first=1 wishes=tile-16 scores=fp8
    previous-block 12 first=1
    previous-block 12 first=1 wishes=tile-16 scores=fp8
    previous-block 8 first=1 wishes=tile-16 scores=fp8 gate=0.05
    previous-block 8 first=1 wishes=tile-16 scores=fp8 gate=0.2
    previous-block 8 first=1 wishes=tile-block scores=fp8
    previous-block 8 first=1 wishes=token-query-head scores=fp8
    previous-block 4 first=1 wishes=token-query-head
"""
WISHES = "wishes"
"""Stands for the arms with wishes and those that they are compared with."""


def _lines(*texts: str) -> list[str]:
    return [line for text in texts for line in text.strip().splitlines()]


SHORT_ARMS = tuple(map(parse_arm, _lines(_EQUAL_BLOCKS, _EQUAL_TIME)))
LONGER_ARMS = tuple(map(parse_arm, _lines(_LONGER)))
LONGEST_ARMS = tuple(map(parse_arm, _lines(_LONGEST)))
WISH_ARMS = tuple(map(parse_arm, (_WHOLE, *_lines(_WISHES))))


def standard_arms(tokens: int) -> tuple[Arm, ...]:
    """The standard set for documents of a length; fewer where a pass takes long."""
    if tokens <= _SHORT_TOKENS:
        return SHORT_ARMS
    return LONGER_ARMS if tokens < _LONGEST_TOKENS else LONGEST_ARMS
