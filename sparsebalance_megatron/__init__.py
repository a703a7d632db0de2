# SPDX-License-Identifier: Apache-2.0
"""Load-balanced long-context training with dynamic sparse attention, as a plugin for Megatron-LM.

Packages, and which way imports go (a test enforces it):

- :mod:`.plan`: one step's plan from its inputs. Python and numpy.
- :mod:`.learn`: what steps teach, and the planner that plans with it. numpy and msgspec.
- :mod:`.cost`: what a micro-batch will cost, in ms. numpy and scipy.
- :mod:`.attention`: block-sparse attention with budgets. torch.
- :mod:`.megatron`: every import of Megatron: flags, layer specs, core attention, groups.
- :mod:`.run`: one training run on one rank.
- :mod:`.log`: what a run writes, and what reads it back; one file per format.
- :mod:`.profile`: measures the cost table.
- :mod:`.data`: documents, samples, packed sequences.
- :mod:`.convert`: Hugging Face weights in Megatron's names and shapes, and back.
- :mod:`.predict`: what a job will take, before it runs. numpy and msgspec.
- :mod:`.view`: pictures and pages of what training wrote, tables of predictions.
- :mod:`.evaluate`: trained models' attention in transformers and lm-evaluation-harness.
- :mod:`.cli`: one file per command.

``plan -> cost``; ``learn -> plan, cost``; ``predict, log -> learn, plan, cost``;
``evaluate -> attention``;
``megatron -> attention, learn, plan, cost``; ``profile -> megatron``;
``run -> megatron, profile, log, data, predict``; ``view -> log, predict``; ``cli -> all``.
:mod:`.integration` is for scripts and trainers that keep their own entry point.

Arrays carry their shape as a suffix (``q_THD``). Letters mean the same in all files: T tokens of
the packed sequence, H query heads, G KV heads, D head dim of keys, F of values, N blocks, K budgets
or places of a list, L layers, S samples or documents, R data-parallel ranks, P pipeline stages,
V virtual stages, C = P x V chunks, M micro-batches, J = R x M micro-batches; a leading 2: forward
and backward. A file's own letters, or closer meanings, stand in its "Shape legend".
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsebalance_megatron.config import SparseBalanceConfig

__all__ = ["SparseBalanceConfig", "__version__"]

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    """``SparseBalanceConfig``, imported at first use: commands start without it."""
    if name != "SparseBalanceConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparsebalance_megatron.config import SparseBalanceConfig

    return SparseBalanceConfig
