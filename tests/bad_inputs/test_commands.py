# SPDX-License-Identifier: Apache-2.0
"""Wrong words after ``sparse-balance``."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_inputs.judge import check_command
from cost.cost_cases import planted_table
from data.tokenizers_of_tests import save_tokenizer
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli

pytestmark = pytest.mark.usefixtures("torch_without_cpu_adapter")

PLAN = "plan --gpus 4 --lengths {folder}/lengths.txt --model {folder}/model --steps 1"
TRAINED = "--global-batch-size 8 --pipeline-model-parallel-size 2"
PREPARE = "prepare-data --input {folder}/good.jsonl --output-prefix {folder}/out"
REPORT = "report {folder}/run -o {folder}/page.html"
SUMMARY = "summary --baseline {folder}/run --run {folder}/run"
TO_HF = "convert to-hf {folder}/nowhere --hf-config {folder}/nowhere --output {folder}/out"

COMMANDS = {
    "plan": PLAN,
    "prepare-data": f"{PREPARE} --tokenizer {{folder}}/tokenizer",
    "report": REPORT,
    "summary": SUMMARY,
    "watch": "watch {folder}/run --once",
}
CONFIG = {
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"max_position_embeddings": 4096},
}
NO_NUMBERS = ("", " ", "x", "nan", "inf", "-inf", "1e400", "9" * 40, "0x10", "1,000", "-1e9", "--")
NO_CHOICES = ("", "nonsense", "--", "NONE")

TOO_SMALL = ("0", "-1", "1.5", "1e3")
BAD_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    PLAN: {
        "--gpus": (*TOO_SMALL, "1000001", "9" * 12),
        "--steps": (*TOO_SMALL, "10001", "9" * 12),
        "--vary": ("", "help", "x --y", "--tensor-model-parallel-size --x", "'"),
        "--model": ("{folder}/gpt-5", "{folder}/lengths.txt", "/dev/null"),
        "--lengths": ("{folder}", "{folder}/nowhere.txt", "/dev/null", "/dev/zero"),
    },
    PREPARE: {
        "--tokenizer": ("{folder}", "{folder}/nowhere", "{folder}/good.jsonl"),
    },
    REPORT: {
        "--step": ("0", "99", "-1", "1.5"),
        "--baseline": ("{folder}/nowhere", "{folder}/good.jsonl", "/dev/null"),
    },
    SUMMARY: {
        "--baseline": ("{folder}", "{folder}/nowhere"),
        "--run": ("{folder}", "{folder}/good.jsonl"),
    },
    TO_HF: {"--dtype": ("float8", ""), "--iteration": ("x", "1.5")},
}
"""Command -> flag -> values of the right type; a refusal names the flag or the value."""


def mistyped() -> Iterator[tuple[str, str, str]]:
    """No number for every flag that takes one, no choice for every flag that has some."""
    for name, command in COMMANDS.items():
        for action in cli.parser_of(name)._actions:
            if action.option_strings and action.nargs != 0:
                numbers = NO_NUMBERS if action.type in (int, float) else ("--",)
                for value in NO_CHOICES if action.choices is not None else numbers:
                    yield command, action.option_strings[-1], value


READY = "--tokenizer {folder}/tokenizer --output-prefix {folder}/o"
PREPARE_INTO = (
    "prepare-data --input {folder}/good.jsonl --tokenizer {folder}/tokenizer --output-prefix="
)
FROM, PROFILE = "convert from-hf {folder}", "profile -o {folder}"
BAD_COMMANDS: dict[str, tuple[str, ...]] = {
    "a run to watch that is not there": (
        "watch {folder}/nowhere --once",
        "No such file",
    ),
    "a prefix that names a folder": (f"{PREPARE_INTO}{{folder}}/", "--output-prefix"),
    "flags after dashes where there are none": (f"{SUMMARY} -- --lr 1", "--lr 1"),
    "a flag that training does not have": (f"{PLAN} -- {TRAINED} --dp 4", "--dp 4"),
    "a value that a flag cannot have": (f"{PLAN} -- --tensor-model-parallel-size x", "'x'"),
    "more stages than layers": (f"{PLAN} -- --pipeline-model-parallel-size 4", "pipeline"),
    "no row that makes a job": (f"{PLAN} --vary=micro-batch-size@3 -- {TRAINED}", "--vary"),
    "a flag that varies twice": (f"{PLAN} --vary=lr@1 --vary=lr@2 -- {TRAINED}", "2 times"),
    "too many rows": (f"{PLAN} --vary=lr@{'@'.join(map(str, range(1, 1002)))}", "1000 rows"),
    "a batch beyond the file": (f"{PLAN} -- --global-batch-size 4000", "lengths.txt", "4000"),
    "a cap below every sample": (
        *(f"{PLAN} -- {TRAINED} --sparse-balance-max-tokens-per-micro-batch 9", "sample"),
    ),
    "a table that is not there": (
        *(f"{PLAN} -- {TRAINED} --sparse-balance-cost-table {{folder}}/a.json", "a.json"),
    ),
    "a length that is none": (
        f"{PLAN.replace('lengths.txt', 'model/config.json')} -- {TRAINED}",
        *("config.json: length 1 is", "must be a whole number from 1 to 1073741824"),
    ),
    "no lengths": ("plan --gpus 4 --model {folder}/model", "--lengths FILE", "--data-path"),
    "no model": (f"plan --gpus 4 --lengths {{folder}}/lengths.txt -- {TRAINED}", "--model DIR"),
    "a zero byte in a path": (f"{PREPARE} --tokenizer {{folder}}/tokenizer\0", "zero byte"),
    "a newline in a file's name": ("prepare-data --input {folder}/a\nb " + READY, r"a\nb"),
    "a flag of many characters": (f"{PLAN} --vary=" + "x" * 4000 + "@1", "x" * 60),
    "a prefix that is empty": (PREPARE_INTO, "--output-prefix"),
    "input that is not there": ("prepare-data --input {folder}/no.jsonl " + READY, "no.jsonl"),
    "input that is a folder": ("prepare-data --input {folder} " + READY, "--input {folder}"),
    "output below a file": (f"{PREPARE_INTO}{{folder}}/good.jsonl/out", "good.jsonl"),
    "output that is the input": (
        "prepare-data --input {folder}/in.bin --tokenizer {folder}/tokenizer "
        "--output-prefix {folder}/in",
        "{folder}/in",
    ),
    "a run that is a file": ("report {folder}/good.jsonl", "good.jsonl"),
    "an empty run": ("report {folder}/empty", "empty"),
    "output that is not empty": ("convert from-hf {folder}/nowhere --output {folder}", "{folder}"),
    "output that is a file": (f"{FROM}/nowhere --output {{folder}}/good.jsonl", "good.jsonl"),
    "output that is a link": (f"{FROM}/nowhere --output {{folder}}/dangling", "dangling"),
    "no config to go back": (TO_HF, "nowhere/config.json"),
    "flags going back": (TO_HF + " -- --bf16", "to-hf"),
    "profile without flags": ("profile -o {folder}/t.json", "--"),
    "profile with no thread": (f"{PROFILE}/t.json --threads 0 -- --num-layers 2", "--threads 0"),
    "profile into a folder": (f"{PROFILE} -- --num-layers 2", "{folder}"),
    "profile below a file": (f"{PROFILE}/good.jsonl/t.json -- --num-layers 2", "good.jsonl"),
}
"""What is wrong -> the command, and what a refusal names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "lengths.txt").write_text("\n".join(str(400 + 97 * n % 3000) for n in range(40)))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    (folder / "good.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    (folder / "in.bin").write_bytes((folder / "good.jsonl").read_bytes())
    (folder / "empty").mkdir()
    save_tokenizer(folder / "tokenizer")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "loop").symlink_to("loop")
    (folder / "table.json").write_text(planted_table().text())
    SampleRun(ranks=1, stages=2, micro_batches=2, layers=2, steps=3).write(folder / "run")
    return folder


VALUES = [
    *(
        (command, flag, value)
        for command, flags in BAD_VALUES.items()
        for flag, values in flags.items()
        for value in values
    ),
    *mistyped(),
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
    of_a_file = flag in ("--lengths", "--model") and value != "--"
    names = (value.format(folder=folder) if of_a_file else flag,)
    check_command(words, capsys, folder, *(() if flag in ("--run", "--baseline") else names))


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_commands(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *names = BAD_COMMANDS[name]
    # A place for spaces inside a word.
    words = [word.format(folder=folder).replace("@", " ") for word in command.split(" ") if word]
    check_command(words, capsys, folder, *(part.format(folder=folder) for part in names))


OUTPUTS = (
    "report {folder}/run -o {output}",
    f"{SUMMARY} -o {{output}}",
    f"{SUMMARY} --picture {{output}}",
)
NO_OUTPUTS = (
    *("", "-", "a\0b", "/dev/full", "/proc/nowhere/x", "/sys/x", "x" * 5000, "{folder}"),
    *("{folder}/lengths.txt/x", "{folder}/loop"),
    *("{folder}/run/steps.jsonl", "{folder}/run/ranks/rank-00000.jsonl"),
)


@pytest.mark.parametrize("output", NO_OUTPUTS)
@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs(
    command: str, output: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(folder=folder, output=output) for word in command.split()]
    words = [word.format(folder=folder) for word in words]
    check_command(words, capsys, folder, *(("jsonl",) if output.endswith("jsonl") else ()))
