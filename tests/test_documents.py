# SPDX-License-Identifier: Apache-2.0
"""What documents tell people to type exists, and links lead somewhere.

bash expands every ``bash`` block of every document, with recorders in the place of all programs; a
program without a rule below is "command not found" and fails. The rules:

- ``sparse-balance``: the real parsers accept it;
- ``torchrun``: its own parser and Megatron's, with this plugin's flags, know every flag;
- a script: it exists and is executable;
- ``python FILE``: the file exists and knows the flags; ``python -m``: the module exists;
- ``git`` and ``pip``: not ours; not checked.

The commands inside scripts/quickstart.sh and scripts/gpu_check.sh go through the same rules.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import PROGRAMS as TEST_PROGRAMS
from harness import run_program
from recorded_programs import record, recorded

from sparsebalance_megatron import cli

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("*", "docs/*", "research/*", "patches/*", "examples/*", "benchmarks/*")
    for path in REPOSITORY.glob(f"{pattern}.md")
)
SCRIPTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("scripts/*.sh", "examples/*.sh", ".ci/run")
    for path in REPOSITORY.glob(pattern)
)
ALTERNATING_RUN = "benchmarks/alternating_run.py"
PROGRAMS = ("git", "pip", "python", "sbatch", "sparse-balance", "torchrun")
PRELUDE = """
set -euo pipefail
DISTRIBUTED_ARGS=(--nproc-per-node 2) MODEL_ARGS=(--num-layers 2) TRAINING_ARGS=(--lr 1e-3)
MODEL_PARALLEL_ARGS=(--sequence-parallel) DATA_ARGS=(--data-path prefix)
EVAL_AND_LOGGING_ARGS=(--log-interval 1) SPARSE_BALANCE_ARGS=(--sparse-balance)
PATCH=patch
source() { :; }
"""

Command = list[str]


def calls_of(folder: Path, script: str) -> list[Command]:
    """The calls that a piece of bash makes; fails if it does.

    Recorders stand for all programs, and at their own paths for all scripts.
    """
    record(folder, [*(f"bin/{name}" for name in PROGRAMS), *SCRIPTS])
    return run_bash(folder, script)


def run_bash(folder: Path, script: str) -> list[Command]:
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, script + result.stderr[-2000:]
    return [words for words, _ in recorded(folder)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def indented_commands(text: str) -> list[str]:
    """Paragraphs that are indented and begin as a command does."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    programs = "|".join((*PROGRAMS, r"\./\S+", "scripts/"))
    pattern = rf"(?<=\n\n)(?:    (?:[A-Z_]+=\S+ )*(?:{programs})\b.*\n)(?:    .*\n)*"
    return re.findall(pattern, outside)


def flags_of(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


class Checks:
    """Applies the rules; what Megatron's parser must know is collected and asked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = ""
        self._megatron: list[tuple[str, Command]] = []

    def check(self, place: str, command: Command) -> None:
        """``place`` names the document in what :meth:`finish` reports."""
        self._place = place
        program, *words = command
        match program:
            case "sparse-balance":
                self._check_tool(words)
            case "torchrun":
                self._check_torchrun(words)
            case "python":
                check_python(words)
                if words[:2] == ["-m", "sparsebalance_megatron.pretrain_gpt"]:
                    self._megatron.append((self._place, words[2:]))
            case "sbatch":
                check_script(next(word for word in words if word.endswith(".sh")))
            case "git" | "pip":
                pass
            case script:
                check_script(script)
                check_paths(words)

    def _check_tool(self, words: Command) -> None:
        arguments = cli.parse(words)
        if arguments.command == "profile":
            self._megatron.append((self._place, arguments.passed_on))

    def _check_torchrun(self, words: Command) -> None:
        from torch.distributed.run import get_args_parser

        launch = get_args_parser().parse_args(words)
        if launch.module:
            assert importlib.util.find_spec(launch.training_script) is not None
            flags = launch.training_script_args
        elif launch.training_script == ALTERNATING_RUN:
            _, place, *flags = launch.training_script_args
            assert place in ("first", "second")
        else:
            assert launch.training_script == "pretrain_gpt.py"
            flags = launch.training_script_args
        self._megatron.append((self._place, flags))

    def finish(self) -> None:
        """Ask Megatron's parser, in a process of its own: the CPU adapter changes torch."""
        program = str(TEST_PROGRAMS / "parse_flags.py")
        done = run_program((program, json.dumps(self._megatron)), self._folder)
        assert done.returncode == 0, done.stderr[-2000:]


def check_script(name: str) -> None:
    name = name.removeprefix("./")
    path = REPOSITORY / name
    assert path.is_file() and os.access(path, os.X_OK), name


def check_paths(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith(("tests/", "examples/")):
            assert (REPOSITORY / word.partition("::")[0]).exists(), word


def check_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
        return
    source = (REPOSITORY / words[0]).read_text()
    source += "".join(path.read_text() for path in (REPOSITORY / words[0][:-3]).glob("*.py"))
    assert [flag for flag in flags_of(words) if f'"{flag}"' not in source] == []


def test_commands_in_blocks(tmp_path: Path) -> None:
    checks = Checks(tmp_path)
    found = 0
    for document in DOCUMENTS:
        text = (REPOSITORY / document).read_text()
        for number, block in enumerate([*blocks(text, "bash"), *indented_commands(text)]):
            folder = tmp_path / document / str(number)
            for command in calls_of(folder, PRELUDE + block):
                checks.check(f"{document}, block {number + 1}", command)
                found += 1
    for argument in ("", "--gpu"):
        for command in quickstart_commands(tmp_path / f"quickstart{argument}", argument):
            checks.check(f"scripts/quickstart.sh {argument}", command)
    for command in gpu_check_commands(tmp_path / "gpu_check"):
        checks.check("scripts/gpu_check.sh", command)
    assert found
    checks.finish()


def script_calls(folder: Path, name: str, arguments: str, *replaced: str) -> list[Command]:
    """What a script of scripts/ calls to its end, with an environment in place.

    Args:
        replaced: a piece of the script, and what stands in its place.
    """
    record(folder, [*(f"bin/{name}" for name in PROGRAMS), *SCRIPTS])
    script = (REPOSITORY / "scripts" / name).read_text()
    if replaced:
        assert replaced[0] in script
        script = script.replace(*replaced)
    (folder / "scripts" / name).write_text(script)
    (folder / "scripts" / "_setup.sh").write_text(
        "set -euo pipefail\nsay() { :; }\nfail() { exit 1; }\nset_up() { :; }\n"
    )
    return run_bash(folder, f"bash scripts/{name} {arguments}")


def quickstart_commands(folder: Path, argument: str) -> list[Command]:
    """What scripts/quickstart.sh calls where there is one GPU."""
    count = "$(python -c 'import torch; print(torch.cuda.device_count())')"
    commands = script_calls(folder, "quickstart.sh", argument, count, "1")
    assert [command[1] for command in commands if command[0] == "sparse-balance"] == [
        *("prepare-data", "profile", "summary")
    ]
    assert [command[0] for command in commands].count("torchrun") == 2
    return commands


def gpu_check_commands(folder: Path) -> list[Command]:
    """What scripts/gpu_check.sh calls, all stages; the recorders leave no results to copy."""
    (folder / "runs" / "quickstart_gpu").mkdir(parents=True)
    (folder / "runs" / "quickstart_gpu" / "summary.json").write_text("{}")
    calls = script_calls(folder, "gpu_check.sh", "results")
    commands = [command for command in calls if command[1:2] != ["-c"]]
    assert len(calls) - len(commands) == 3
    assert [command[0] for command in commands] == [
        *("sparse-balance", "python", "scripts/quickstart.sh", "sparse-balance"),
        *("python", "python", "python"),
    ]
    return commands


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_sentences(document: str) -> None:
    """Their program, subcommand and flags exist; what stands for a value is free."""
    text = re.sub(r"^```.*?^```$", "", (REPOSITORY / document).read_text(), flags=re.S | re.M)
    for span in re.findall(r"`([^`]+)`", text):
        program, *words = span.split() or [""]
        if program == "sparse-balance" and words:
            check_mentioned_tool(words)
        elif program == "python" and words:
            check_python([word.strip("[]") for word in words])
        elif program.startswith(("./scripts/", "scripts/", "examples/", "./.ci/")):
            assert (REPOSITORY / program.rstrip("/")).exists(), span


def check_mentioned_tool(words: Sequence[str]) -> None:
    if words[0].startswith("--"):
        assert words[0] == "--help"
        return
    assert words[0] in cli.COMMANDS, words[0]
    own = [word.strip("[]") for word in words[1:]]
    own = own[: own.index("--")] if "--" in own else own
    parser = argparse.ArgumentParser()
    command = words[0].replace("-", "_")
    importlib.import_module(f"sparsebalance_megatron.cli.{command}").add_flags(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert set(flags_of(own)) <= known


def anchors(path: Path) -> set[str]:
    """What a heading can be linked by, as GitHub names it."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []
