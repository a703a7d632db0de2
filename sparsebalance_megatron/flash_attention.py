# SPDX-License-Identifier: Apache-2.0
"""Conditions under which FlashAttention-4 serves: version, device, head dims. Loads nothing.

Kernels ask what runs, counted costs what will run.
"""

import re
from functools import cache

from sparsebalance_megatron.supported import installed_version

_OLDEST_BETA = 30
"""The oldest beta release of 4.0.0 that serves. Before 26 some launches of its backward pass gave
NaN (Dao-AILab/flash-attention, issue 2756)."""
_CAPABILITIES = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}
"""Compute capabilities of the counted devices that it serves."""


@cache
def not_installed() -> str | None:
    """Say that the distribution is missing or old, and the remedy; None where it is there."""
    found = installed_version("flash-attn-4")
    beta = re.match(r"4\.0\.0b(\d+)", found or "4.0.0b0")
    if beta is None or int(beta[1]) >= _OLDEST_BETA:
        return None
    return (
        f"needs flash-attn-4 4.0.0b{_OLDEST_BETA} or newer, found {found or 'none'}: "
        "pip install 'sparsebalance-megatron[fa4]'"
    )


def head_obstacle(
    capability: tuple[int, int], heads: tuple[int, int], head_dims: tuple[int, int]
) -> str | None:
    """Say what a device's kernels do not serve of query and KV heads, with head dims of keys and of
    values; None where they serve."""
    if capability[0] not in (9, 10):
        return "needs a GPU of compute capability 9.x or 10.x, not {}.{}".format(*capability)
    head_dim, value_dim = head_dims
    latent = head_dims == (192, 128) and heads[0] == heads[1]
    if latent or (head_dim == value_dim and (head_dim in range(8, 129, 8) or head_dim == 256)):
        return None
    return (
        "serves one head dim that is a multiple of 8 up to 128, or 256, and 192 with values of 128 "
        f"where no query heads share a KV head; not {head_dim} with {value_dim}"
    )


def will_serve(
    device: str, heads: tuple[int, int], head_dims: tuple[int, int], *, named: bool
) -> bool:
    """Whether it serves a counted device. Where it is ``named`` it will be installed there."""
    there = device in _CAPABILITIES and (named or not_installed() is None)
    return there and head_obstacle(_CAPABILITIES[device], heads, head_dims) is None
