# SPDX-License-Identifier: Apache-2.0
"""Runs `sparse-balance` commands one after another, each in a fork of a process that has imported
Megatron already; and one command of its own, ``logits``.

    python convert_worker.py COMMANDS.json RESULTS.json
"""

import json
import multiprocessing
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from sparsebalance_megatron import cli
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron import cpu

BLOCK_SIZE = 16


def save_logits(output: Path, hf_dir: Path, tokens: list[list[int]], **budgets: Any) -> None:
    """Our float32 logits [T, V] of documents packed into one row, from weights in ``hf_dir``.

    Every parameter is filled with NaN before the weights are read.
    """
    from sparsebalance_megatron.convert import megatron_model
    from sparsebalance_megatron.convert.hf_config import read_config
    from sparsebalance_megatron.convert.mapping import parameters
    from sparsebalance_megatron.convert.transfer import WeightFiles, read_weights
    from sparsebalance_megatron.megatron.core_attention import (
        AttentionOptions,
        sparse_balance_layer_spec,
    )
    from sparsebalance_megatron.megatron.single_process import start_single_process

    model = read_config(hf_dir)
    args = megatron_model.parse_model_flags(model, (), dtype=torch.float32)
    start_single_process(args.seed, torch.device("cpu"))
    config = SparseBalanceConfig(block_size=BLOCK_SIZE, **budgets)
    options = AttentionOptions(config, grid=(1, config.base_budget))
    built = megatron_model.build_model(model, args, sparse_balance_layer_spec(options))
    targets = dict(built.named_parameters())
    for target in targets.values():
        target.data.fill_(float("nan"))
    with WeightFiles(hf_dir) as files:
        read_weights(files, targets, model, parameters(model))
    torch.save(_packed_logits(built, tokens), output)


@torch.no_grad()
def _packed_logits(model, tokens: list[list[int]]) -> torch.Tensor:
    from small_gpt import thd_params

    lengths = [len(document) for document in tokens]
    params = thd_params(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
    tokens_1T = torch.tensor([token for document in tokens for token in document])[None]
    positions_1T = torch.cat([torch.arange(length) for length in lengths])[None]
    return model(tokens_1T, positions_1T, None, packed_seq_params=params)[0]


def run_command(words: list[str]) -> int:
    match words:
        case ["logits", output, hf_dir, tokens, budget, selection, layers]:
            save_logits(
                *(Path(output), Path(hf_dir), json.loads(Path(tokens).read_text())),
                base_budget=int(budget),
                selection=selection,
                layer_budgets=layers or None,
            )
            return 0
        case _:
            return cli.main(words)


def run_printing_to(words: list[str], directory: str) -> None:
    """Run in this process, print into files, exit with the command's status."""
    with (
        open(f"{directory}/stdout", "w") as out,
        open(f"{directory}/stderr", "w") as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            status = run_command(words)
        except Exception:
            traceback.print_exc()
            status = 1
    sys.exit(status)


def run_forked(words: list[str]) -> dict[str, object]:
    """Exit status and what was printed."""
    with tempfile.TemporaryDirectory() as directory:
        # Unlike a bare fork it ends the helper processes of the checkpoint writer.
        child = multiprocessing.get_context("fork").Process(
            target=run_printing_to, args=(words, directory)
        )
        child.start()
        child.join()
        stdout, stderr = (Path(directory, name).read_text() for name in ("stdout", "stderr"))
    return {"status": child.exitcode, "stdout": stdout, "stderr": stderr}


if __name__ == "__main__":
    cpu.install()

    commands = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run_forked(words) for name, words in commands.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))
