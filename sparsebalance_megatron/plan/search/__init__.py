# SPDX-License-Identifier: Apache-2.0
"""One local search over the places and cp_sizes of micro-batches: state, moves, acceptance."""
