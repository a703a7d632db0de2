# SPDX-License-Identifier: Apache-2.0
"""Load-balanced long-context training with dynamic sparse attention, as a plugin for Megatron-LM.

Rooms, and which way they may look (a test enforces it):

- :mod:`.plan`: which sample runs where, and with which attention budget. Pure Python and numpy.
- :mod:`.cost`: what a micro-batch will cost, in ms. Pure numpy and scipy.
- :mod:`.attention`: block-sparse attention with budgets. Pure torch.
- :mod:`.data`: documents, samples, packed rows; imports only Megatron's dataset readers.
- :mod:`.convert`: Hugging Face weights in Megatron's names and shapes, and back. Pure torch.
- :mod:`.runtime`: the glue to Megatron; the only room that imports ``megatron``.
- :mod:`.workload`: length distributions and model presets, to plan without training. Pure numpy.
- :mod:`.report`: reads what training wrote, and prints plans of workloads.

``runtime -> {plan, cost, attention, data, convert}``, ``plan -> cost``,
``workload -> {plan, cost}``, ``report -> {workload, plan's data types and simulator}``.
:mod:`.integration` is for scripts and trainers that keep their own entry point.
"""

from sparsebalance_megatron.config import SparseBalanceConfig

__all__ = ["SparseBalanceConfig", "__version__"]

__version__ = "0.1.0"
