# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with the model ``sparse-balance``: ``python -m``, then its arguments."""

import sys
from traceback import walk_tb

from sparsebalance_megatron.command_entry import ends_in_one_line

_READ_ARGUMENTS = ("lm_eval", "transformers", "huggingface_hub", "datasets", "safetensors")
"""Packages that look up what the arguments name."""


def run() -> int:
    """Evaluate; the exit status."""
    from lm_eval.__main__ import cli_evaluate

    from sparsebalance_megatron.evaluate import lm_eval_model

    assert lm_eval_model.SparseBalanceLM is not None
    cli_evaluate()
    return 0


def is_mistake(error: BaseException) -> bool:
    """Whether a model, a task or a file that the arguments name is not there or not usable."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_globals.get("__name__", "") if frames else ""
    known = isinstance(error, ValueError | OSError | KeyError | AssertionError)
    return known and raised_in.partition(".")[0] in _READ_ARGUMENTS


if __name__ == "__main__":
    sys.exit(ends_in_one_line("sparse-balance evaluate", run, is_mistake))
