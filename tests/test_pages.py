# SPDX-License-Identifier: Apache-2.0
"""What pages tell people to type exists, their examples run, and the site builds.

bash expands every ``bash`` block of every page, with recorders in the place of all programs; a
program without a rule in :func:`check` is "command not found" and fails. The commands inside
scripts/quickstart.sh and scripts/gpu_check.sh go through the same rules.
"""

import argparse
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from recorded_programs import record, recorded, run_bash

from sparsebalance_megatron import cli
from sparsebalance_megatron.attention.api import budgeted_attention
from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "research/*.md", "patches/*.md")
    for path in ROOT.glob(pattern)
)
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("scripts/*.sh", "examples/*.sh", ".ci/run")
    for path in ROOT.glob(pattern)
)
PROGRAMS = ("git", "pip", "python", "sbatch", "sparse-balance", "torchrun")
PRELUDE = """
set -euo pipefail
DISTRIBUTED_ARGS=(--nproc-per-node 2) MODEL_ARGS=(--num-layers 2) TRAINING_ARGS=(--lr 1e-3)
MODEL_PARALLEL_ARGS=(--sequence-parallel) DATA_ARGS=(--data-path prefix)
EVAL_AND_LOGGING_ARGS=(--log-interval 1) SPARSE_BALANCE_ARGS=(--sparse-balance)
PATCH=patch
source() { :; }
"""
SETUP = {
    "scripts/_setup.sh": "set -euo pipefail\nsay() { :; }\nfail() { exit 1; }\nset_up() { :; }\n"
}
SITE = """
import sys
sys.modules.update(dict.fromkeys(("torch", "megatron", "triton")))
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""

Command = list[str]


def calls_of(folder: Path, script: str, texts: Mapping[str, str] | None = None) -> list[Command]:
    """The calls that a piece of bash makes; fails if it does.

    Args:
        texts: scripts of the repository that are run and not recorded, by name.
    """
    record(folder, [*(f"bin/{name}" for name in PROGRAMS), *SCRIPTS])
    for name, text in (texts or {}).items():
        (folder / name).write_text(text)
    run_bash(["-c", script], folder)
    return [words for words, _ in recorded(folder)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def indented_commands(text: str) -> list[str]:
    """Paragraphs that are indented and begin as a command does."""
    programs = "|".join((*PROGRAMS, r"\./\S+", "scripts/"))
    pattern = rf"(?<=\n\n)(?:    (?:[A-Z_]+=\S+ )*(?:{programs})\b.*\n)(?:    .*\n)*"
    return re.findall(pattern, without_blocks(text))


def flags_of(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def check(command: Command) -> Command:
    """Whether a command could run; the flags in it that Megatron's parser must know."""
    program, *words = command
    match program:
        case "sparse-balance":
            arguments = cli.parse(words)
            return arguments.passed_on if arguments.command in ("plan", "profile") else []
        case "torchrun":
            from torch.distributed.run import get_args_parser

            launch = get_args_parser().parse_args(words)
            if launch.module:
                assert importlib.util.find_spec(launch.training_script) is not None
                return launch.training_script_args
            if launch.training_script == "benchmarks/alternating_run.py":
                return launch.training_script_args[3:]
            assert launch.training_script == "pretrain_gpt.py"
            return launch.training_script_args
        case "python":
            check_python(words)
            return words[2:] if words[1] == "sparsebalance_megatron.pretrain_gpt" else []
        case "sbatch":
            check_script(next(word for word in words if word.endswith(".sh")))
        case "git" | "pip":
            pass
        case _:
            check_script(program)
            for word in words:
                if word.startswith(("tests/", "examples/")):
                    assert (ROOT / word.partition("::")[0]).exists(), word
    return []


def check_script(name: str) -> None:
    assert os.access(ROOT / name.removeprefix("./"), os.X_OK), name


def check_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
        return
    source = (ROOT / words[0]).read_text()
    source += "".join(path.read_text() for path in (ROOT / words[0][:-3]).glob("*.py"))
    assert [flag for flag in flags_of(words) if f'"{flag}"' not in source] == []


def test_commands_in_blocks(tmp_path: Path) -> None:
    from megatron.training.arguments import add_megatron_arguments

    commands = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for number, block in enumerate([*blocks(text, "bash"), *indented_commands(text)], 1):
            calls = calls_of(tmp_path / page / str(number), PRELUDE + block)
            commands += [(f"{page}, block {number}", call) for call in calls]
    for argument in ("", "--gpu"):
        for call in quickstart_commands(tmp_path / f"quickstart{argument}", argument):
            commands.append((f"scripts/quickstart.sh {argument}", call))
    for call in gpu_check_commands(tmp_path / "gpu_check"):
        commands.append(("scripts/gpu_check.sh", call))
    assert len(commands) > 50
    megatron = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = add_sparse_balance_args(megatron)
    for place, command in commands:
        _, unknown = parser.parse_known_args(check(command))
        assert not unknown, (place, unknown)


def quickstart_commands(folder: Path, argument: str) -> list[Command]:
    """What scripts/quickstart.sh calls where there are two GPUs."""
    script = (ROOT / "scripts/quickstart.sh").read_text()
    count = "$(python -c 'import torch; print(torch.cuda.device_count())')"
    assert count in script
    texts = SETUP | {"scripts/quickstart.sh": script.replace(count, "2")}
    commands = calls_of(folder, f"bash scripts/quickstart.sh {argument}", texts)
    tools = [command[1] for command in commands if command[0] == "sparse-balance"]
    assert tools == ["prepare-data", "profile", "summary"]
    assert [command[0] for command in commands].count("torchrun") == 4
    return commands


def gpu_check_commands(folder: Path) -> list[Command]:
    """What scripts/gpu_check.sh calls, all stages; the recorders leave no results to copy."""
    (folder / "runs" / "quickstart_gpu").mkdir(parents=True)
    (folder / "runs" / "quickstart_gpu" / "summary.json").write_text("{}")
    texts = SETUP | {"scripts/gpu_check.sh": (ROOT / "scripts/gpu_check.sh").read_text()}
    calls = calls_of(folder, "bash scripts/gpu_check.sh results", texts)
    commands = [command for command in calls if command[1:2] != ["-c"]]
    assert [command[0] for command in commands].count("python") == 6
    return commands


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences(page: str) -> None:
    """Their program, subcommand and flags exist; what stands for a value is free."""
    for span in re.findall(r"`([^`]+)`", without_blocks((ROOT / page).read_text())):
        program, *words = span.split() or [""]
        words = [word.strip("[]") for word in words]
        if program == "sparse-balance" and words and words[0] != "--help":
            assert words[0] in cli.COMMANDS, span
            own = words[: words.index("--")] if "--" in words else words
            actions = cli.parser_of(words[0])._actions
            known = {flag for action in actions for flag in action.option_strings}
            assert set(flags_of(own)) <= known, span
        elif program == "python" and words:
            check_python(words)
        elif program.startswith(("./scripts/", "scripts/", "examples/", "./.ci/")):
            assert (ROOT / program.rstrip("/")).exists(), span


def test_the_site_builds_without_torch_and_without_a_warning(tmp_path: Path) -> None:
    """Links that lead nowhere are warnings."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-c", SITE, *options, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "docs" / "PYTHON.html").read_text("utf-8")
    assert "sparsebalance_megatron.integration" in page


def test_extending_names_only_what_exists() -> None:
    """Every name and file in backticks is in the package, its examples or its tests."""
    text = without_blocks((ROOT / "docs/EXTENDING.md").read_text("utf-8"))
    folders = ("sparsebalance_megatron", "examples", "tests")
    source = "\n".join(
        path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")
    )
    for span in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"^\w+(?=\(|$)|(?<=, )\w+(?==|\()", span):
            assert re.search(rf"\b{name}\b", source), name
        if re.fullmatch(r"[\w/]+\.py", span):
            known = (ROOT / span, ROOT / "sparsebalance_megatron" / span)
            assert any(path.exists() for path in known), span


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of EXTENDING.md, of PYTHON.md and of examples/extending, as they stand there."""
    for page in ("docs/EXTENDING.md", "docs/PYTHON.md"):
        (block,) = blocks((ROOT / page).read_text("utf-8"), "python")
        exec(compile(block, page, "exec"), {})
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples/extending/gpipe.py"))
    assert capsys.readouterr().out.split("\n")[:2] == [str(np.array([22.0]))] * 2
    names = runpy.run_path(str(ROOT / "examples/extending/counting_exchange.py"))
    alone = budgeted_attention(
        *(names["q"], names["k"], names["v"], [0, 100, 300], 4),
        block_size=16,
        softmax_scale=names["scale"],
    )
    assert all(map(np.array_equal, alone, (names["out"], names["lse"])))
    assert names["exchange"].read_bytes == 2 * 300 * 2 * 32 * 4
