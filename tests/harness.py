# SPDX-License-Identifier: Apache-2.0
"""Runs the real training loop on several ranks and reads back what it printed and logged."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forked_ranks import cpu_environment as python_environment
from forked_ranks import free_port, run_alone, run_ranks

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = REPOSITORY / "tests" / "programs"
"""What tests start."""
CHANGED = str(PROGRAMS / "changed_entry.py")
TIMEOUT_S = 240
_GRACE_S = 40
"""More than torchrun gives its ranks to end by themselves."""
VOCABULARY = 256
FEW_ROUNDINGS = 8 * 2.0**-23
"""Placements and layouts differ in the order of float32 sums only."""

MODEL_FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--seq-length", "256", "--max-position-embeddings", "256"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1)),
)
TRAINING_FLAGS = (
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "4"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
    *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000"),
    *("--split", "100,0,0", "--seed", "1234"),
)
BALANCE_FLAGS = (
    "--sparse-balance",
    *("--sparse-balance-block-size", "16", "--sparse-balance-base-budget", "4"),
    *("--sparse-balance-dense-up-to", "0"),
    *("--sparse-balance-config", "calibration=off"),
)

EXPERT_FLAGS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "0"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
EXPERT_PARALLEL_FLAGS = (*EXPERT_FLAGS, "--expert-model-parallel-size", "2")

_ITERATION = re.compile(
    r"iteration +(\d+)/.*?lm loss: ([-+.\deE]+|nan) .*?grad norm: ([-+.\deE]+|nan) "
)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What one run left behind."""

    exit_code: int
    output: str
    steps: list[dict[str, Any]]

    @property
    def losses(self) -> list[str]:
        """Losses as printed: seven digits, compared as text where runs must be identical."""
        return [match[1] for match in _ITERATION.findall(self.output)]

    @property
    def grad_norms(self) -> list[str]:
        return [match[2] for match in _ITERATION.findall(self.output)]

    def logged(self, name: str) -> list[Any]:
        """A value of every step record."""
        return [step[name] for step in self.steps]

    def require_success(self) -> "TrainingRun":
        """Self; fails with the end of the output otherwise."""
        if self.exit_code:
            raise AssertionError(f"exit code {self.exit_code}\n{self.output[-6000:]}")
        return self


def write_documents(
    prefix: Path,
    lengths_tokens: Sequence[int],
    *,
    vocabulary: int = VOCABULARY,
    seed: int = 7,
    masked: bool = False,
) -> Path:
    """A real .bin/.idx pair of random documents with a learnable bias towards small tokens.

    Args:
        masked: write a loss mask, too, in which every other token counts.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_idx_path

    def write(path: str, dtype: type, documents: Iterable[np.ndarray]) -> None:
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
        for values in documents:
            builder.add_document(values.astype(dtype), [len(values)])
        builder.finalize(get_idx_path(path))

    generator = np.random.default_rng(seed)
    documents = (generator.random(length) ** 3 * (vocabulary - 1) for length in lengths_tokens)
    write(str(prefix), np.uint16, documents)
    if masked:
        write(f"{prefix}_loss_mask", np.uint8, (np.arange(length) % 2 for length in lengths_tokens))
    return prefix


def long_tailed_lengths(documents: int, longest: int, seed: int = 3) -> list[int]:
    """Log-normal document lengths, cut at ``longest``."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(longest / 6), 0.9, documents)
    return [int(np.clip(length, 4, longest)) for length in drawn]


def run_training(
    ranks: int,
    flags: Sequence[str],
    *,
    log_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    program: Sequence[str] = ("-m", "sparsebalance_megatron.pretrain_gpt"),
    torchrun: bool = False,
    environment: Mapping[str, str] | None = None,
) -> TrainingRun:
    """Run a program on ranks of one thread each, until the first of them fails or all end.

    Args:
        environment: what the ranks' differs in; not for torchrun.
        torchrun: start them with it, for what it does itself, and where processes must differ in
            all they can; else they are forked, which spares them most imports.
    """
    command = [*program, *flags]
    if log_dir is not None:
        command += ["--sparse-balance-log-dir", str(log_dir)]
    with tempfile.TemporaryDirectory() as directory:
        printed = Path(directory, "output")
        if torchrun:
            exit_code = _run_torchrun(ranks, command, printed, timeout_s)
        else:
            exit_code = run_ranks(
                ranks,
                command,
                environment=python_environment() | dict(environment or {}),
                output=printed,
                timeout_s=timeout_s,
            )
        output = printed.read_text(errors="replace")
    if exit_code is None:
        raise AssertionError(f"no end after {timeout_s} s; the output ends\n{output[-4000:]}")
    return TrainingRun(
        exit_code=exit_code, output=output, steps=read_steps(log_dir) if log_dir else []
    )


def train(ranks: int, documents: Path, *flags: str, **options: Any) -> TrainingRun:
    """Train the small model with the plugin; ``flags`` win, ``options`` are of `run_training`."""
    common = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, "--data-path", str(documents))
    return run_training(ranks, (*common, *flags), **options)


def run_program(program: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """``python PROGRAM...`` in ``folder``, on a machine without a GPU, started without torchrun."""
    return run_alone(program, environment=python_environment(), folder=folder, timeout_s=TIMEOUT_S)


def _run_torchrun(
    ranks: int, command: Sequence[str], printed: Path, timeout_s: float
) -> int | None:
    """The exit code; None after a timeout, when all are ended."""
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
    ]
    # A file has no reader that would wait for orphans of a killed rank, as a pipe has.
    with printed.open("wb") as file:
        process = subprocess.Popen(
            [*launcher, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=python_environment(),
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # It ends its ranks, and kills those that do not end.
            process.terminate()
            process.wait(_GRACE_S)
            return None


def read_records(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Records of one kind of a log file; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def read_steps(log_dir: Path, rank: int | None = None) -> list[dict[str, Any]]:
    """The step records of a run's log, or of the log of a rank."""
    name = "steps.jsonl" if rank is None else f"ranks/rank-{rank:05d}.jsonl"
    return read_records(log_dir / name)


def measured_ms(step: dict[str, Any]) -> np.ndarray:
    """Forward and backward times [2, R, P, V, M] of a step record; NaN what was not measured."""
    return np.array(step["measured"]["times_2RPVM"], float)


def assert_same_steps(
    found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], *, loss: bool = True
) -> None:
    """Every step has the loss, plan and coverage of the expected step of its iteration."""
    by_iteration = {step["iteration"]: step for step in expected}
    assert found
    for step in found:
        for quantity in ("predicted", "tokens", *(["lm_loss"] if loss else [])):
            assert step[quantity] == by_iteration[step["iteration"]][quantity], quantity
        figures, others = (each["figures"] for each in (step, by_iteration[step["iteration"]]))
        for name in ("coverage", "coverage_base", "coverage_min", "unobserved"):
            assert figures[name] == others[name], name


def assert_order_is_simulated(log_dir: Path, ranks: int) -> None:
    """Every stage ran its forwards and backwards in the order that plans are simulated with.

    Megatron names no backward; the recorder takes its identity from that order.
    """
    from sparsebalance_megatron.log.reader import read_run_log

    log = read_run_log(log_dir)
    assert log.header is not None
    job = log.header.job
    for rank in range(ranks):
        (mine,) = read_records(log_dir / "ranks" / f"rank-{rank:05d}.jsonl", "rank")
        for step, logged in zip(read_steps(log_dir), read_steps(log_dir, rank), strict=True):
            if step["iteration"] > 1:  # hooks go in with the first forward of a run
                micro_batches = measured_ms(step).shape[-1]
                simulated = job.schedule(job.pipeline_stages, micro_batches, job.virtual_stages)
                operations = simulated.by_stage[mine["pipeline_rank"]]
                assert [tuple(span[:3]) for span in logged["spans"]] == [
                    (each.direction, each.chunk, each.micro_batch) for each in operations
                ]
