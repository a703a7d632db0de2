# SPDX-License-Identifier: Apache-2.0
"""Every file format that the package reads, with random damage: its own error, or none.

Damage is bytes changed, cut out, repeated, or replaced by what trips formats: a function of a
number.

``pytest tests/bad_inputs/test_fuzzing.py --damage 20000`` looks longer than continuous integration.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_inputs.test_models import CONFIG, write_weights
from cost.cost_cases import planted_table
from data.stored_documents import open_stored
from data.test_documents import ONES, VOCABULARY, tokens, write
from data.test_documents import read as read_stored
from learn.scheduler_cases import make_scheduler
from plan.plan_cases import job_shape
from record_cases import rank_header, rank_step

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.transfer import INDEX, WHOLE, WeightFiles
from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.table import CostTable, CostTableError
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.errors import ConvertError, DataError
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.log.files import LogWriter
from sparsebalance_megatron.predict.workload import WorkloadError, read_lengths
from sparsebalance_megatron.run import agreement

_TOKENS = (
    *(b"", b"\x00", b"\xff", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"null", b"true"),
    *(b"9" * 400, b"9" * 5000, b"[", b"]", b"{", b"}", b'"', b",", b"\n", b"\r", b"\\ud800"),
    *(b"[" * 3000, b'{"a":' * 3000, b"\xed\xa0\x80", b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
)


def damaged(original: bytes, count: int) -> Iterator[tuple[int, bytes]]:
    """``count`` damaged copies, each with its number, from 0."""
    for number in range(count):
        yield number, _damage(original, random.Random(number))


def _damage(original: bytes, generator: random.Random) -> bytes:
    raw = bytearray(original)
    for _ in range(generator.choice((1, 1, 1, 2, 4, 16))):
        start = generator.randrange(len(raw) + 1)
        end = min(len(raw), start + generator.choice((0, 1, 1, 2, 4, 8, 64)))
        kind = generator.randrange(5)
        if kind == 0 and end > start:
            raw[start] ^= 1 << generator.randrange(8)
        elif kind == 1:
            raw[start:end] = generator.choice(_TOKENS)
        elif kind == 2:
            del raw[start:end]
        elif kind == 3:
            raw[start:start] = raw[generator.randrange(len(raw) + 1) :][:64]
        elif generator.random() < 0.2:
            del raw[start:]
        else:
            raw[start:end] = generator.randbytes(end - start)
    return bytes(raw)


def check_reader(
    original: bytes,
    count: int,
    read: Callable[[bytes], object],
    errors: type[Exception] | tuple[type[Exception], ...],
) -> int:
    """Read damaged copies; how many were refused. Anything but ``errors`` fails with its number."""
    read(original)
    refused = 0
    for number, raw in damaged(original, count):
        try:
            read(raw)
        except errors as error:
            assert "\n" not in str(error), (number, str(error))
            refused += 1
        except Exception as error:
            raise AssertionError(f"damage {number}: {type(error).__name__}: {error}") from error
    return refused


@pytest.fixture
def damage(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--damage"))


ROPE = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
RECORDS = [{"text": "one"}, {"messages": TURNS}, {"text": "two", "id": 5}]
FILES: dict[str, tuple[str, Callable[[Path], object], type[Exception]]] = {
    "table.json": (
        planted_table().text(),
        lambda path: fit_cost_model(CostTable.load(path)),
        CostTableError,
    ),
    "config.json": (
        json.dumps(CONFIG | {"rope_scaling": ROPE, "layer_types": ["full_attention"]}),
        lambda path: read_config(path.parent),
        ConvertError,
    ),
    "documents.jsonl": (
        "\n".join(map(json.dumps, RECORDS)),
        lambda path: list(RecordFiles([path]).records(BadRecords(skip=False))),
        DataError,
    ),
    "lengths.json": ("[5, 70, 1234, 99]", read_lengths, WorkloadError),
}
"""A file that is read whole -> its text, its reader, and the reader's error."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("error")
def test_single_files(name: str, tmp_path: Path, damage: int) -> None:
    text, read_path, error = FILES[name]

    def read(raw: bytes) -> None:
        (tmp_path / name).write_bytes(raw)
        read_path(tmp_path / name)

    assert check_reader(text.encode(), damage, read, error) > damage // 4


@pytest.mark.parametrize("name", [WHOLE, INDEX])
def test_weights(name: str, tmp_path: Path, damage: int) -> None:
    names = write_weights(tmp_path)
    weight_map = {"weight_map": dict.fromkeys(names, WHOLE)}
    if name == INDEX:
        (tmp_path / INDEX).write_text(json.dumps(weight_map))
    model = read_config(tmp_path)

    def read(raw: bytes) -> None:
        (tmp_path / name).write_bytes(raw)
        with WeightFiles(tmp_path) as files:
            files.check_matches(model)

    original = (tmp_path / name).read_bytes()
    head = original[: 8 + int.from_bytes(original[:8], "little")] if name == WHOLE else original
    rest = original[len(head) :]
    assert check_reader(head, damage, lambda raw: read(raw + rest), ConvertError) > damage // 4


@pytest.mark.parametrize("suffix", [".idx", ".bin", "_loss_mask.idx", "_loss_mask.bin", ".json"])
def test_data_files(suffix: str, tmp_path: Path, damage: int) -> None:
    prefix = write(tmp_path / "train", tokens(np.uint16))
    write(tmp_path / "train_loss_mask", ONES)
    Path(f"{prefix}.json").write_text(json.dumps({"tokenizer": {"vocab_size": VOCABULARY}}))
    path = Path(f"{prefix}{suffix}")

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        read_stored(prefix)

    refused = check_reader(path.read_bytes(), damage, read, DataError)
    assert suffix == ".json" or refused > damage // 4


def test_logs_that_a_resumed_run_goes_on_with(tmp_path: Path, damage: int) -> None:
    path = tmp_path / "steps.jsonl"

    def resume(raw: bytes) -> None:
        path.write_bytes(raw)
        log = LogWriter(path, rank_header())
        log.append(rank_step)
        log.close()
        lines = path.read_bytes().splitlines()
        assert json.loads(lines[-1])["iteration"] == 1

    original = b'{"type":"run","lines_discarded":12}\n{"type":"step","iteration":6}\n'
    assert check_reader(original, damage // 2, resume, ()) == 0


JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**30, 2.5, float("nan"), float("inf"), "", "x", [], {}, [[1.0]]),
)


def junk_within(value: Any, generator: random.Random) -> Any:
    """A copy with something else in a random place."""
    if isinstance(value, dict | list) and value and generator.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = generator.choice(keys)
        changed = copy.copy(value)
        if isinstance(changed, dict) and generator.random() < 0.1:
            del changed[key]
        else:
            changed[key] = junk_within(value[key], generator)
        return changed
    return generator.choice(JUNK)


def test_checkpoint_state(tmp_path: Path, damage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """State that fits no run is refused, or the part of it that does not starts afresh."""
    prefix = write(tmp_path / "train", tokens(np.uint16))
    index = open_stored(prefix)

    def scheduler() -> Scheduler:
        return make_scheduler(index, job=job_shape(1, 2), batch_sizes=2, max_blocks=8)

    monkeypatch.setattr(agreement, "print_rank_0", lambda *lines: None)
    record = {"training samples": index.digest(), "torch": "2"}
    saved = scheduler().state_dict() | {"run": record, "iteration": 0}
    agreement.take_over(saved, scheduler(), record)
    for number in range(damage // 2):
        state = junk_within(saved, random.Random(number))
        try:
            if isinstance(state, dict):
                agreement.take_over(state, scheduler(), record)
        except StateError as error:
            assert "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"state {number}: {type(error).__name__}: {error}") from error
