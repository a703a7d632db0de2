# SPDX-License-Identifier: Apache-2.0
"""Wrong words after ``sparse-balance``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_inputs.judge import check_command
from view.report.sample_run import SampleRun

PLAN = "plan --lengths {folder}/lengths.txt --dp 2 --pp 2 --micro-batches 2 --model qwen2.5-0.5b"
ADVISE = (
    "advise --lengths {folder}/lengths.txt --model qwen2.5-0.5b --gpus 4 --pp 2 --global-batch 8 "
    "--block-sizes 128 --base-budgets 8 --steps 1"
)
SIMULATE = "simulate --setup paper-ablation"
PREPARE = "prepare-data --input {folder}/good.jsonl --output-prefix {folder}/out"
REPORT = "report {folder}/run -o {folder}/page.html"
TRACE = "trace {folder}/run -o {folder}/trace.json"
SUMMARY = "summary --baseline {folder}/run --run {folder}/run"
FROM_HF = "convert from-hf {folder}/nowhere --output {folder}/out"
TO_HF = "convert to-hf {folder}/nowhere --hf-config {folder}/nowhere --output {folder}/out"

COUNTS = ("0", "-1", "x", "", "1.5", "nan", "1e3")
SHARES = ("1", "1.0", "2", "5", "-0.1", "nan", "inf", "x", "")
BAD_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    PLAN: {
        **dict.fromkeys(("--dp", "--pp", "--tp", "--micro-batches", "--steps"), COUNTS),
        "--base-budget": (*COUNTS, str(2**31), str(2**40), "9" * 30),
        "--block-size": (*COUNTS, "3", "96", "100", str(2**21), str(2**40)),
        "--layers": COUNTS,
        "--global-batch": (*COUNTS, "3", "5"),
        "--coverage-threshold": SHARES,
        "--plan-ms": ("-1", "nan", "inf", "1e9", "x"),
        "--max-tokens-per-micro-batch": ("0", "-1", "x", "1.5"),
        "--seed": ("-1", "x", "1.5"),
        "--context-parallel-size": ("3",),
        "--max-context-parallel": ("4",),
        "--gigabytes-per-second": ("0", "1e-300", "1e300"),
        "--seq-length": ("128",),
        "--batching": ("best", ""),
        "--tuning": ("on", "anchors"),
        "--anchor": ("median",),
        "--model": ("gpt-5", ""),
        "--lengths": ("{folder}", "{folder}/nowhere.txt", "/dev/null", "/dev/zero"),
    },
    f"{PLAN} --context-parallel-size 2": {"--max-context-parallel": ("1",)},
    ADVISE: {
        "--model": ("gpt-9",),
        "--gpus": ("3",),
        "--tp": ("4",),
        "--global-batch": ("41",),
        "--block-sizes": ("1", "100"),
        "--gpu-memory": ("nan",),
        "--seq-length": ("0",),
    },
    PLAN.partition(" --model")[0] + " --layers 4": {
        "--cost-table": ("{folder}", "{folder}/nowhere.json", "/dev/zero", "{folder}/lengths.txt")
    },
    SIMULATE: {
        "--steps": (*COUNTS, "10001", "9" * 12),
        "--seed": ("-1", "x", "1.5"),
        "--coverage-threshold": SHARES,
        "--setup": ("paper", ""),
        "--rows": ("", "OURS", "ours-dynamic-cp"),
    },
    PREPARE: {
        "--tokenizer-train": (*COUNTS, "256", "10000000", "9" * 13),
        "--tokenizer": ("{folder}", "{folder}/nowhere", "{folder}/good.jsonl"),
        "--on-bad-record": ("ignore",),
    },
    REPORT: {
        "--step": ("0", "99", "-1", "x", "1.5"),
        "--baseline": ("{folder}/nowhere", "{folder}/good.jsonl", "/dev/null"),
    },
    TRACE: {"--steps": ("0:0", "9:8", "1", "1:", ":", "a:b", "1:2:3", "-1:2", "99:100", "²:3")},
    SUMMARY: {
        "--baseline": ("{folder}", "{folder}/nowhere"),
        "--run": ("{folder}", "{folder}/good.jsonl"),
    },
    TO_HF: {"--dtype": ("float8", ""), "--iteration": ("x", "1.5")},
}
"""Command -> flag -> values; a refusal names the flag or the value."""

READY = "--tokenizer-train 300 --output-prefix {folder}/o"
BAD_COMMANDS: dict[str, tuple[str, ...]] = {
    "no command": ("", "COMMAND"),
    "micro-batches that make no job": (f"{ADVISE} --micro-batches 3", "no choice makes a job"),
    "context groups of three": (f"{ADVISE} --context-parallel-sizes 3", "power of two"),
    "more stages than layers to advise on": (f"{ADVISE} --gpus 25 --pp 25", "24 layers"),
    "a log in place of a summary": (
        f"{SUMMARY} -o {{folder}}/run/steps.jsonl",
        "{folder}/run/steps.jsonl",
    ),
    "a log in place of a picture": (
        f"{SUMMARY} --picture {{folder}}/run/steps.jsonl",
        "{folder}/run/steps.jsonl",
    ),
    "a run to watch that is not there": ("watch {folder}/nowhere --once", "not there yet"),
    "no time between looks": ("watch {folder}/run --interval 0", "--interval 0.0"),
    "no time between pages": (f"{REPORT} --follow 0", "--follow"),
    "a prefix that names a folder": (
        "prepare-data --input {folder}/good.jsonl --tokenizer-train 300 --output-prefix {folder}/",
        "--output-prefix",
    ),
    "an unknown command": ("trian", "trian"),
    "flags after dashes where there are none": (f"{PLAN} -- --lr 1", "--lr 1"),
    "an unknown flag": (f"{PLAN} --gpus 8", "--gpus"),
    "more stages than layers": (f"{PLAN} --pp 99", "--pp 99", "24 layers"),
    "a batch beyond the file": (
        f"{PLAN} --global-batch 4000",
        "lengths.txt",
        "4000",
        "--dp",
        "--micro-batches",
    ),
    "heads that ranks cannot share": (f"{PLAN} --tp 1000", "--tp 1000", "14 heads"),
    "a cap below every sample": (f"{PLAN} --max-tokens-per-micro-batch 9", "sample"),
    "a table without layers": (
        PLAN.partition(" --model")[0] + " --cost-table {folder}/t.json",
        "--layers",
    ),
    "two sources of costs": (f"{PLAN} --cost-table a --model qwen2.5-3b",),
    "dashes for a value": (f"{PLAN} --dp=--", "--dp=--"),
    "a zero byte in a path": (f"{PREPARE} --tokenizer-train 300\0", "zero byte"),
    "a newline in a file's name": ("prepare-data --input {folder}/a\nb " + READY, r"a\nb"),
    "a newline in an unknown flag": (f"{PLAN} --a\nb", r"--a\nb"),
    "rows of many characters": (f"{SIMULATE} --rows " + "x" * 4000, "x" * 60),
    "a prefix that is empty": (
        "prepare-data --input {folder}/good.jsonl --tokenizer-train 300 --output-prefix=",
        "--output-prefix",
    ),
    "no lengths": ("plan --dp 1 --pp 1 --micro-batches 1", "--lengths"),
    "no setup": ("simulate", "--setup"),
    "no input": ("prepare-data --output-prefix x --tokenizer-train 300", "--input"),
    "no tokenizer": (PREPARE, "--tokenizer"),
    "input that is not there": ("prepare-data --input {folder}/no.jsonl " + READY, "no.jsonl"),
    "input that is a folder": ("prepare-data --input {folder} " + READY, "--input {folder}"),
    "output below a file": (
        (
            "prepare-data --input {folder}/good.jsonl --tokenizer-train 300 "
            "--output-prefix {folder}/good.jsonl/out"
        ),
        "good.jsonl",
    ),
    "output that is the input": (
        "prepare-data --input {folder}/in.bin --tokenizer-train 300 --output-prefix {folder}/in",
        "{folder}/in",
    ),
    "output that is there": (
        (
            "prepare-data --input {folder}/good.jsonl --tokenizer-train 300 "
            "--output-prefix {folder}/there"
        ),
        "there.bin",
        "--overwrite",
    ),
    "a page below a file": ("report {folder}/run -o {folder}/good.jsonl/x", "good.jsonl"),
    "a page that is a folder": ("report {folder}/run -o {folder}", "{folder}"),
    "a trace that is a folder": ("trace {folder}/run -o {folder}", "{folder}"),
    "a trace below a file": ("trace {folder}/run -o {folder}/good.jsonl/t.json", "good.jsonl"),
    "a summary that is a folder": (f"{SUMMARY} -o {{folder}}", "{folder}"),
    "a run that is not there": ("report {folder}/nowhere", "nowhere"),
    "a run that is a file": ("trace {folder}/good.jsonl", "good.jsonl"),
    "an empty run": ("trace {folder}/empty", "empty"),
    "no direction": ("convert", "from-hf"),
    "no config": (FROM_HF, "nowhere/config.json"),
    "no output": ("convert from-hf {folder}/nowhere", "--output"),
    "both outputs": (FROM_HF + " --print-flags",),
    "output that is not empty": ("convert from-hf {folder}/nowhere --output {folder}", "{folder}"),
    "output that is a file": (
        "convert from-hf {folder}/nowhere --output {folder}/good.jsonl",
        "good.jsonl",
    ),
    "output that is a dangling link": (
        "convert from-hf {folder}/nowhere --output {folder}/dangling",
        "dangling",
    ),
    "no config to go back": (TO_HF, "nowhere/config.json"),
    "flags going back": (TO_HF + " -- --bf16", "to-hf"),
    "profile without flags": ("profile -o {folder}/t.json", "--"),
    "profile without output": ("profile -- --num-layers 2", "--output"),
    "profile with no thread": (
        "profile -o {folder}/t.json --threads 0 -- --num-layers 2",
        "--threads 0",
    ),
    "profile into a folder": ("profile -o {folder} -- --num-layers 2", "{folder}"),
    "profile below a file": (
        "profile -o {folder}/good.jsonl/t.json -- --num-layers 2",
        "good.jsonl",
    ),
}
"""What is wrong -> the command, and what a refusal names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "lengths.txt").write_text("\n".join(str(400 + 97 * n % 3000) for n in range(40)))
    (folder / "good.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    for name in ("in.bin", "there.bin", "there.idx"):
        (folder / name).write_bytes((folder / "good.jsonl").read_bytes())
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to(folder / "nothing")
    SampleRun(ranks=1, stages=2, micro_batches=2, layers=2, steps=3).write(folder / "run")
    return folder


VALUES = [
    (command, flag, value)
    for command, flags in BAD_VALUES.items()
    for flag, values in flags.items()
    for value in values
]


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    VALUES,
    ids=[f"{command.partition(' ')[0]} {flag} {value}" for command, flag, value in VALUES],
)
def test_values(
    command: str, flag: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(folder=folder) for word in (*command.split(), f"{flag}={value}")]
    if flag == "--tokenizer-train" or command != PREPARE:
        names = (value.format(folder=folder) if flag.startswith(("--lengths", "--cost")) else flag,)
    else:
        names = (flag,)
    if flag in ("--run", "--baseline"):
        names = ()
    check_command(words, capsys, folder, *names)


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_commands(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *names = BAD_COMMANDS[name]
    words = [word.format(folder=folder) for word in command.split(" ") if word]
    check_command(words, capsys, folder, *(part.format(folder=folder) for part in names))
