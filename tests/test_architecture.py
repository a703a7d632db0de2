# SPDX-License-Identifier: Apache-2.0
"""Rules that are read from the source: who may import what, where a step may wait for the device or
copy, that nothing runs what it reads; and what `import` really loads."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "sparsebalance_megatron"
SOURCE = REPOSITORY / PACKAGE
MAX_LINES = 600
SPDX = "# SPDX-License-Identifier: Apache-2.0"


OPEN_TO_ALL = """
    config errors json_file flags flash_attention layer_budgets selector_registry supported
    command_entry text_table __version__
"""
"""What every file may import of the package itself."""
IMPORT_RULES = {
    "plan": ("numpy", "plan cost"),
    "learn": ("msgspec numpy", "learn plan cost"),
    "cost": ("msgspec numpy scipy", "cost"),
    "attention": ("cutlass flash_attn numpy torch triton", "attention"),
    "megatron": ("megatron msgspec numpy torch", "attention cost learn megatron plan"),
    "run": (
        "numpy torch",
        """attention.device attention.repetitions attention.sequence
        cost data learn log megatron plan predict profile run""",
    ),
    "log": ("filelock msgspec numpy", "cost learn log plan"),
    "profile": ("numpy torch", "attention cost megatron plan profile"),
    "data": (
        "jinja2 msgspec numpy pyarrow tokenizers tqdm transformers",
        "data megatron.datasets",
    ),
    "convert/megatron_": ("msgspec torch", "convert evaluate.settings megatron"),
    "convert": ("huggingface_hub msgspec safetensors torch", "convert"),
    "predict": ("msgspec numpy", "cost learn plan predict"),
    "view/report": ("jinja2 matplotlib numpy scipy", "cost learn log plan view.report"),
    "view": ("numpy", "cost predict view.report.numbers"),
    "evaluate": (
        "lm_eval msgspec safetensors torch transformers",
        "attention cost.work_model evaluate",
    ),
    "cli": (
        "numpy safetensors scipy torch tqdm",
        "attention cli convert cost data learn log megatron plan predict profile run view",
    ),
    "pretrain_gpt.py": ("", "cli.dry_run integration megatron run"),
    "integration.py": ("torch", "cost learn megatron plan run"),
    "config.py": ("", ""),
    "errors.py": ("", ""),
    "layer_budgets.py": ("", ""),
    "selector_registry.py": ("", ""),
    "flags.py": ("msgspec", ""),
    "flash_attention.py": ("", ""),
    "json_file.py": ("msgspec", ""),
    "text_table.py": ("tqdm", ""),
    "command_entry.py": ("", ""),
    "supported.py": ("", ""),
    "__init__.py": ("", ""),
}
"""Beginning of paths, the first that fits counts -> modules from outside that the files may import
beside the standard library, and modules of the package. A name allows all below it."""


def rule_of(path: str) -> str | None:
    """The key of the rule of a file; None where it has none."""
    return next((name for name in IMPORT_RULES if path.startswith(name)), None)


def allows(rule: str, module: str) -> bool:
    """Whether files of a rule may import a module."""
    outside, inside = IMPORT_RULES[rule]
    own = module.removeprefix(f"{PACKAGE}.")
    if own != module:
        allowed = f"{inside} {OPEN_TO_ALL}".split()
    else:
        allowed = [*outside.split(), *sys.stdlib_module_names]
    return any(own == name or own.startswith(f"{name}.") for name in allowed)


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, module name) of every import statement, those inside functions included.

    ``from package import name`` counts as ``package.name``: the name may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def package_files() -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def source_files() -> list[Path]:
    folders = (PACKAGE, "tests", "benchmarks", "examples", "scripts", "patches")
    found = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in (".py", ".sh"))


def test_every_file_has_a_rule() -> None:
    assert [path for path in package_files() if rule_of(path) is None] == []


@pytest.mark.parametrize("rule", IMPORT_RULES)
def test_imports(rule: str) -> None:
    files = [path for path in package_files() if rule_of(path) == rule]
    assert files
    broken = [
        f"{PACKAGE}/{path}:{line} imports {imported}"
        for path in files
        for line, imported in imported_modules((SOURCE / path).read_text("utf-8"))
        if not allows(rule, imported)
    ]
    assert broken == []


@pytest.mark.parametrize(
    "module", [PACKAGE, f"{PACKAGE}.config", f"{PACKAGE}.cli", f"{PACKAGE}.integration"]
)
def test_import_is_light(module: str) -> None:
    """`import` and `sparse-balance --help` load no heavy library."""
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); before = set(sys.modules); "
        f"import {module}; new = {{name.partition('.')[0] for name in set(sys.modules) - before}}; "
        "print(*sorted(new & {'torch', 'megatron', 'numpy', 'scipy', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in source_files()}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_files_carry_the_licence() -> None:
    files = [*source_files(), REPOSITORY / "setup.py", REPOSITORY / ".ci" / "run"]
    unmarked = [str(path) for path in files if SPDX not in path.read_text("utf-8").splitlines()[:2]]
    assert unmarked == []


WAITING = {"cpu", "cuda", "item", "nonzero", "pin_memory", "synchronize"}
"""Methods that wait for the device, copy to the host, or copy to the device elsewhere than in
``device.copied_to``. ``torch.tensor`` with a device does too."""
STEP = ("attention/", "megatron/", "run/")
"""Packages whose code runs in a step."""
ALLOWED = {
    "attention/device.py": {"non_blocking", "pin_memory"},
    # Rows of Megatron's own data loader, which pins them.
    "megatron/plain_gpt.py": {"cuda", "non_blocking"},
    # The copy of a step that the host waits for: the next plan but one is made of it.
    "run/step_reducer.py": {"cpu"},
    # The digest that all ranks compare once a step, and before the first.
    "run/agreement.py": {"cpu", "tensor"},
    # At a step's end.
    "megatron/timing.py": {"synchronize"},
    # Before training.
    "attention/self_check.py": {"cpu", "tensor"},
}


def waiting_calls(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every call of a method of ``WAITING``, of ``to(non_blocking=...)``, and of
    ``tensor(device=...)``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in WAITING:
                yield node.lineno, node.func.attr
            keywords = {keyword.arg for keyword in node.keywords}
            if "non_blocking" in keywords:
                yield node.lineno, "non_blocking"
            if node.func.attr in ("tensor", "as_tensor") and "device" in keywords:
                yield node.lineno, "tensor"


@pytest.mark.parametrize("file", [path for path in package_files() if path.startswith(STEP)])
def test_the_host_waits_and_copies_in_the_named_places_alone(file: str) -> None:
    allowed = ALLOWED.get(file, set())
    found = list(waiting_calls((SOURCE / file).read_text("utf-8")))
    assert [call for call in found if call[1] not in allowed] == []
    assert allowed <= {name for _, name in found}, "an exception that nothing needs"


RUNS_WHAT_IT_READS = re.compile(
    r"(?<![\w.])(?:eval|exec|compile|__import__)\("
    r"|^ *(?:import|from) (?:c?pickle|dill|cloudpickle|shelve|marshal)\b"
    r"|\b(?:os\.system|os\.popen|torch\.load|yaml\.load)\("
    r"|\b(?:shell|trust_remote_code|allow_pickle)=(?!False\b)"
    # Without the argument, transformers asks at a terminal whether to run a model's code.
    r"|\.from_pretrained\((?![^)]*\btrust_remote_code=False\b)",
    re.MULTILINE | re.IGNORECASE,
)


def test_the_package_runs_nothing_that_it_reads() -> None:
    found = {
        path: RUNS_WHAT_IT_READS.findall((SOURCE / path).read_text("utf-8"))
        for path in package_files()
    }
    assert {path: calls for path, calls in found.items() if calls} == {
        "evaluate/__init__.py": [".from_pretrained("],  # an example in its docstring
        "megatron/saved_model.py": ["import pickle"],
    }
    source = (SOURCE / "megatron/saved_model.py").read_text("utf-8")
    assert set(re.findall(r"pickle\.(\w+)", source)) == {"Unpickler", "UnpicklingError"}


def test_tests_that_judge_changes_exist() -> None:
    named = re.findall(r'"(tests/[\w/]+\.py)"', (REPOSITORY / "scripts/mutation.py").read_text())
    assert named and [name for name in named if not (REPOSITORY / name).exists()] == []
