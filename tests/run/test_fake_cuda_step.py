# SPDX-License-Identifier: Apache-2.0
"""A whole step of Megatron's loop on fake CUDA tensors: devices, waits, copies, launches.

What of a training step lies on two devices, or has a size that the device decides, ends the
program. The kernels that the step launched are compiled for the GPUs that there are tile shapes
for, with the specialisations that the step gave them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_program, write_documents

from sparsebalance_megatron.config import DEFAULT_SELECTION

triton = pytest.importorskip("triton")

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "4096", "--ffn-hidden-size", "8192"),
    *("--num-attention-heads", "32", "--group-query-attention", "--num-query-groups", "8"),
    *("--seq-length", "8192", "--max-position-embeddings", "8192"),
    *("--position-embedding-type", "none", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--no-masked-softmax-fusion", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "32000", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--train-iters", "2", "--lr", "1e-3", "--clip-grad", "0", "--split", "100,0,0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
    *("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled", "--sparse-balance"),
    *("--sparse-balance-block-size", "256", "--sparse-balance-base-budget", "8"),
    *("--sparse-balance-dense-up-to", "0"),
)
STATIC = ("--sparse-balance-config", "context-parallel=static")
WAITS = {
    # Once a step, behind its last operation: the times of events.
    "sparsebalance_megatron.megatron.timing.elapsed_ms",
    # Megatron's, after the optimizer: did all ranks update, and the gradients' norm.
    "megatron.training.utils.common_utils.logical_and_across_model_parallel_group",
    "megatron.training.utils.common_utils.reduce_max_stat_across_model_parallel_group",
}
COPIES = {
    "to cuda: sparsebalance_megatron.attention.device.copied_to",
    # Once a step: what was measured.
    "to cpu: sparsebalance_megatron.run.step_reducer._sum",
    *(f"to cuda: {name}" for name in WAITS if name.startswith("megatron.")),
}


def _step(folder: Path, *flags: str, ranks: int = 1, capabilities: str = "") -> dict[str, Any]:
    documents = write_documents(folder / "train", [8192, 3000, 700, 4000, 8192, 1000, 5000, 2222])
    result = folder / "result.json"
    program = (str(PROGRAMS / "fake_cuda_step.py"), str(result), str(ranks), capabilities)
    run = run_program((*program, *FLAGS, "--data-path", str(documents), *flags), folder)
    assert result.exists(), run.stdout[-6000:] + run.stderr[-6000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def check_waits_and_copies(found: dict[str, Any], flags: tuple[str, ...] = ()) -> None:
    # Megatron waits for the device after every exchange of pipeline stages (batch_p2p_sync).
    exchanges = found["waits"].pop(
        "megatron.core.pipeline_parallel.p2p_communication._communicate", 0
    )
    assert bool(exchanges) == ("--pipeline-model-parallel-size" in flags)
    assert set(found["waits"]) == WAITS
    assert set(found["copies"]) == COPIES
    assert found["copies"]["to cpu: sparsebalance_megatron.run.step_reducer._sum"] == 1


@pytest.mark.process
@pytest.mark.parametrize(
    "selection",
    [
        DEFAULT_SELECTION,
        # scripts/test_triton_3_6.sh runs them on every push.
        pytest.param("previous-block", marks=pytest.mark.nightly),
        pytest.param("vertical-slash", marks=pytest.mark.nightly),
    ],
)
def test_a_step_waits_and_copies_in_the_named_places_alone(selection: str, tmp_path: Path) -> None:
    selects = ("--sparse-balance-selection", selection)
    found = _step(tmp_path, *selects, capabilities="90")
    check_waits_and_copies(found)
    assert found["compiled"]["90"].keys() == found["launches"].keys()


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "calls"),
    [
        # Keys and values are gathered head by head: 8 heads of 3 sequences in 2 layers. The fourth
        # is covered by its budget: its lists hold everything, for blocks of queries.
        (("--context-parallel-size", "2", *STATIC), 48),
        # One layer of this stage; 5 segments that are not covered.
        (("--pipeline-model-parallel-size", "2", "--sparse-balance-max-segments", "4"), 5),
    ],
    ids=["shared", "segments"],
)
def test_steps_that_share_or_cut_sequences_wait_nowhere_else(
    flags: tuple[str, ...], calls: int, tmp_path: Path
) -> None:
    found = _step(tmp_path, *flags, ranks=2)
    check_waits_and_copies(found, flags)
    # Once for each backward of attention by token.
    assert found["launches"]["_delta_kernel"] == calls


@pytest.mark.nightly
def test_what_a_step_launches_compiles_for_ampere_and_blackwell(tmp_path: Path) -> None:
    found = _step(tmp_path, capabilities="80,100")
    assert found["compiled"]["80"].keys() == found["compiled"]["100"].keys()
