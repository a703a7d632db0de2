# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with the model ``sparse-balance``: ``python -m``, then its arguments."""

from lm_eval.__main__ import cli_evaluate

from sparsebalance_megatron.evaluate import lm_eval_model

if __name__ == "__main__":
    assert lm_eval_model.SparseBalanceLM is not None
    cli_evaluate()
