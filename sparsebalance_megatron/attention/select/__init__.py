# SPDX-License-Identifier: Apache-2.0
"""Interface of selectors, which choose the KV blocks that a query reads."""

from typing import Any, Protocol

from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import ConfigError, Router, flag_with
from sparsebalance_megatron.selector_registry import load_selector


class Selector[Summarised, Ranked](Protocol):
    """Lists of KV blocks under a budget, from queries and keys; docs/EXTENDING.md is its guide.

    Three steps, so that a rank may hold some of a sequence's blocks: summaries of what it holds,
    which are gathered; ranking for its own queries; and, once a document's mass is known, the cut.
    No method reads the device from the host, carries a gradient, or gives another result in a
    recomputed pass. :func:`rank_sequence` takes the first two steps for a sequence that lies here
    as a whole::

        selector = selector_named("token-query-head")
        layout = packed_layout([0, 1000, 4000], block_size=128, device=q.device)
        how = {"softmax_scale": 64**-0.5, "max_budget": 8, "observe": True}
        ranking = rank_sequence(selector, q, k, layout, **how)
        coverage = selector.coverage(ranking)  # [2, most blocks of a document]
        selection = selector.select(ranking, torch.tensor([4, 8]))
        out, lse = block_sparse_attention(q, k, v, selection, softmax_scale=64**-0.5)
    """

    @property
    def by_token(self) -> bool:
        """Whether tokens select, each for itself, or the tokens of a block together."""

    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> Summarised:
        """Summarise the blocks of a sequence. Each entry depends on its own block alone, so those
        of several sequences may be put together in any order."""

    def rank(
        self,
        q_THD: Tensor,
        summaries: Summarised,
        layouts: LayoutPair,
        *,
        softmax_scale: float,
        max_budget: int,
        observe: bool,
    ) -> Ranked:
        """Rank what each query may read, in lists that serve budgets up to ``max_budget``, by the
        summaries of the keys' sequence; the mass of coverage only where ``observe`` says so."""

    def coverage(self, ranking: Ranked) -> Tensor:
        """Score coverage curves_SK: float32 [S, K], the share of a document's router mass that
        budget k reaches in column k - 1, for every budget up to the most blocks of a document."""

    def select(self, ranking: Ranked, budgets_S: Tensor) -> Selection:
        """Select what the documents' budgets allow; one below 1 counts as 1, one above
        ``max_budget`` as ``max_budget``."""


def rank_sequence[Summarised, Ranked](
    selector: Selector[Summarised, Ranked],
    q_THD: Tensor,
    k_TGD: Tensor,
    layout: PackedLayout,
    *,
    softmax_scale: float,
    max_budget: int,
    observe: bool,
) -> Ranked:
    """Rank a sequence whose queries and keys all lie here; what does not fit is a ValueError."""
    return selector.rank(
        *(q_THD, selector.summaries(q_THD, k_TGD, layout), LayoutPair.within(layout)),
        softmax_scale=softmax_scale,
        max_budget=max_budget,
        observe=observe,
    )


def selector_named(
    name: str, router: Router = "auto", first_blocks: int | None = None
) -> Selector[Any, Any]:
    """The selector of a name that ``--sparse-balance-selection`` takes.

    A selector that leaves a choice of router has ``with_router``, and of first blocks
    ``with_first_blocks``; None is its own default.

    Raises:
        ConfigError: there is none of that name, it cannot be loaded, or it leaves no choice of
            router or first blocks.
    """
    selector: Any = load_selector(name)
    chosen: dict[str, Any] = {} if router == "auto" else {"router": router}
    if first_blocks is not None and first_blocks != getattr(selector, "first_blocks", 0):
        chosen["first_blocks"] = first_blocks
    for option, value in chosen.items():
        if not hasattr(selector, f"with_{option}"):
            raise ConfigError(
                f"{flag_with(option, value)}: selection {name} leaves no choice of "
                f"{option.replace('_', ' ')}; drop the flag"
            )
        selector = getattr(selector, f"with_{option}")(value)
    return selector
