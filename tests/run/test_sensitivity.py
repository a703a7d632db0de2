# SPDX-License-Identifier: Apache-2.0
"""Sensitivities of saved weights are the same under every layout, and training follows them."""

import json
from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    long_tailed_lengths,
    run_program,
    train,
    write_documents,
)
from megatron.core.dist_checkpointing import load_common_state_dict

from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.layer_budgets import DENSE, parse_layer_budgets
from sparsebalance_megatron.run.sensitivity import check_finite

LAYOUTS = {
    "one rank": (1, ()),
    "stages": (2, ("--pipeline-model-parallel-size", "2")),
    "heads": (2, ("--tensor-model-parallel-size", "2")),
    "samples": (2, ("--sparse-balance-max-context-parallel", "2")),
}


@pytest.mark.distributed
def test_sensitivities_are_those_of_the_weights_and_become_budgets(tmp_path: Path) -> None:
    # Few tokens: three of them come again.
    lengths = long_tailed_lengths(60, longest=250)
    documents = write_documents(tmp_path / "train", lengths, vocabulary=40)
    common = ("--ckpt-format", "torch_dist", "--train-iters")
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", "1")
    train(1, documents, *common, "1", *saved).require_success()
    load = ("--load", str(tmp_path / "saved"))
    found, cuts = {}, {}
    for name, (ranks, layout) in LAYOUTS.items():
        path = tmp_path / f"{name}.json"
        command = ("-m", "sparsebalance_megatron.cli", "sensitivity", "-o", str(path))
        check = ("--check",) if name in ("one rank", "stages") else ()
        program = (*command, "--samples", "20", *check, "--")
        flags = (*common, "1", *load, *layout)
        run = train(ranks, documents, *flags, program=program).require_success()
        assert ("rank correlation" in run.output) == bool(check)
        document = json.loads(path.read_text())
        assert (document["samples"], document["block_size"]) == (24, 16)
        found[name] = document["sensitivities"]
        cuts[name] = document["cuts"]
    assert len(found["one rank"]) == 4 and min(found["one rank"]) > 0
    assert all(each == pytest.approx(found["one rank"], abs=1e-3) for each in found.values())
    assert cuts["heads"] == cuts["samples"] == []
    assert len(cuts["one rank"]) == 4 and all(cuts["one rank"])
    assert cuts["stages"] == pytest.approx(cuts["one rank"], abs=1e-4)

    # Without a launcher.
    path = tmp_path / "alone.json"
    program = ("-m", "sparsebalance_megatron.cli", "sensitivity", "-o", str(path))
    program = (*program, "--samples", "20", "--")
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, "--data-path", str(documents))
    alone = run_program((*program, *flags, *common, "1", *load), tmp_path)
    assert alone.returncode == 0, alone.stderr[-4000:]
    assert json.loads(path.read_text())["sensitivities"] == pytest.approx(
        found["one rank"], abs=0.1
    )

    # Layers of weights that hardly trained are alike.
    document["sensitivities"] = [0.1, 0.9, 0.1, 0.1]
    path.write_text(json.dumps(document))
    chosen = ("--sparse-balance-sensitivity", str(path))
    saved = ("--save", str(tmp_path / "again"), "--save-interval", "2")
    flags = (*common, "2", *load, *saved, *chosen, "--override-opt-param-scheduler")
    trained = train(1, documents, *flags).require_success()
    args = load_common_state_dict(str(tmp_path / "again" / "iter_0000002"))["args"]
    budgets = parse_layer_budgets(args.sparse_balance_layer_budgets)
    assert args.sparse_balance_sensitivity is None
    # As counted on a GPU, dense attention of documents of a few blocks is faster than lists.
    assert set(budgets.values()) == {DENSE}
    assert "base budgets by sensitivity: dense:0-3; " in trained.output


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "samples", "named"),
    [
        (("--load", "nowhere"), "8", "no checkpoint in --load nowhere"),
        ((), "8", "no checkpoint in --load None"),
        (("--load", "empty"), "61", "--samples 61: the training data has 60"),
        (("--num-attention-heads", "6"), "8", "Megatron refuses the flags"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    given: tuple[str, ...], samples: str, named: str, tmp_path: Path
) -> None:
    documents = write_documents(tmp_path / "train", long_tailed_lengths(60, longest=250))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("1")
    program = ("-m", "sparsebalance_megatron.cli", "sensitivity", "-o", str(tmp_path / "s.json"))
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, "--data-path", str(documents))
    run = run_program((*program, "--samples", samples, "--", *flags, *given), tmp_path)
    assert run.returncode == 2 and named in run.stderr.splitlines()[-1], run.stderr[-4000:]
    assert "Traceback" not in run.stderr and not (tmp_path / "s.json").exists()


def test_attention_that_is_not_finite_is_refused_before_a_file_is_replaced() -> None:
    with pytest.raises(ConfigError, match="weights in saved are damaged"):
        check_finite([0.1, float("nan")], "saved")
    check_finite([0.1, 0.0], "saved")
