# SPDX-License-Identifier: Apache-2.0
"""Which room may import what, read from the source; what `import` really loads; file sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "sparsebalance_megatron"
MAX_LINES = 600
SPDX = "# SPDX-License-Identifier: Apache-2.0"


OPEN_TO_ALL = (
    *("config", "errors", "json_file", "flags", "layer_budgets", "selector_registry", "supported"),
    *("command_entry", "text_table"),
    "__version__",
)


@dataclass(frozen=True, kw_only=True)
class ImportRule:
    """What the files under a path of the package may import beside the standard library.

    A name allows the module and everything below it. The package's own modules are named from the
    package on: ``plan`` is ``sparsebalance_megatron.plan``. Of the package itself only
    ``OPEN_TO_ALL`` is open to everyone.
    """

    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()

    def allows(self, module: str) -> bool:
        own = module.removeprefix(f"{PACKAGE}.")
        if own != module:
            return _within(own, (*self.inside, *OPEN_TO_ALL))
        if module == PACKAGE:
            return False
        return module.partition(".")[0] in sys.stdlib_module_names or _within(module, self.outside)


IMPORT_RULES = {
    "plan": ImportRule(outside=("numpy",), inside=("plan", "cost")),
    "learn": ImportRule(outside=("msgspec", "numpy"), inside=("learn", "plan", "cost")),
    "cost": ImportRule(outside=("msgspec", "numpy", "scipy"), inside=("cost",)),
    "attention": ImportRule(outside=("numpy", "torch", "triton"), inside=("attention",)),
    "megatron": ImportRule(
        outside=("megatron", "msgspec", "numpy", "torch"),
        inside=("attention", "cost", "learn", "megatron", "plan"),
    ),
    "run": ImportRule(
        outside=("numpy", "torch"),
        inside=(
            *("attention.host_copy", "attention.repetitions", "attention.sequence", "cost", "data"),
            *("learn", "log"),
            *("megatron", "plan", "predict", "profile", "run", "view.predictions"),
        ),
    ),
    "log": ImportRule(
        outside=("filelock", "msgspec", "numpy"), inside=("cost", "learn", "log", "plan")
    ),
    "profile": ImportRule(
        outside=("numpy", "torch"), inside=("attention", "cost", "megatron", "plan", "profile")
    ),
    "data": ImportRule(
        outside=(
            *("jinja2", "msgspec", "numpy", "pyarrow", "tokenizers", "tqdm"),
            "transformers",
        ),
        inside=("data", "megatron.datasets"),
    ),
    "convert/megatron_": ImportRule(
        outside=("msgspec", "torch"), inside=("convert", "evaluate.settings", "megatron")
    ),
    "convert": ImportRule(
        outside=("huggingface_hub", "msgspec", "safetensors", "torch"), inside=("convert",)
    ),
    "predict": ImportRule(
        outside=("msgspec", "numpy"), inside=("cost", "learn", "plan", "predict")
    ),
    "view/report": ImportRule(
        outside=("jinja2", "matplotlib", "numpy", "scipy"),
        inside=("learn", "log", "plan", "view.report"),
    ),
    "view": ImportRule(inside=("cost", "predict")),
    "evaluate": ImportRule(
        outside=("lm_eval", "msgspec", "safetensors", "torch", "transformers"),
        inside=("attention", "cost.work_model", "evaluate"),
    ),
    "cli": ImportRule(
        outside=("numpy", "safetensors", "torch", "tqdm"),
        inside=(
            *("attention", "cli", "convert", "cost", "data", "learn", "log", "megatron", "plan"),
            *("predict", "profile", "run", "view"),
        ),
    ),
    "pretrain_gpt.py": ImportRule(inside=("integration", "megatron", "run")),
    "integration.py": ImportRule(
        outside=("torch",), inside=("cost", "learn", "megatron", "plan", "run")
    ),
    "config.py": ImportRule(),
    "errors.py": ImportRule(),
    "layer_budgets.py": ImportRule(),
    "selector_registry.py": ImportRule(),
    "flags.py": ImportRule(outside=("msgspec",)),
    "json_file.py": ImportRule(outside=("msgspec",)),
    "text_table.py": ImportRule(outside=("tqdm",)),
    "command_entry.py": ImportRule(),
    "supported.py": ImportRule(),
    "__init__.py": ImportRule(),
}
"""Keys are beginnings of paths; the first that fits counts."""


def rule_of(path: str) -> str:
    """The name of a file's room."""
    return next(name for name in IMPORT_RULES if path.startswith(name))


RESERVED = {
    "P": ("pipeline stages",),
    "V": ("virtual stages",),
    "M": ("micro-batches",),
    "R": ("data-parallel ranks",),
    "L": ("layers",),
    "S": ("samples", "documents"),
    "T": ("tokens",),
    "H": ("query heads",),
    "G": ("KV heads",),
    "D": ("head dim",),
    "N": ("blocks",),
    "K": ("budgets", "places of a list"),
}
"""Letters of shapes that mean one thing in the whole package, and how a legend explains them."""


def _within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


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
    root = REPOSITORY / PACKAGE
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))


def source_files() -> list[Path]:
    folders = (PACKAGE, "tests", "benchmarks", "examples", "scripts", "patches")
    found = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in (".py", ".sh"))


def test_every_file_has_a_room() -> None:
    homeless = [path for path in package_files() if not any(map(path.startswith, IMPORT_RULES))]
    assert homeless == []


@pytest.mark.parametrize("room", IMPORT_RULES)
def test_arrows(room: str) -> None:
    files = [path for path in package_files() if rule_of(path) == room]
    assert files
    broken = [
        f"{PACKAGE}/{path}:{line} imports {imported}"
        for path in files
        for line, imported in imported_modules((REPOSITORY / PACKAGE / path).read_text("utf-8"))
        if not IMPORT_RULES[room].allows(imported)
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


def legend(source: str) -> dict[str, str]:
    """Letter -> meaning, of the sentence in a module's docstring that begins "Shape legend:"."""
    _, _, after = (ast.get_docstring(ast.parse(source)) or "").partition("Shape legend:")
    sentence = re.sub(r"\([^)]*\)", "", after.partition("\n\n")[0].replace("\n", " "))
    entries = [entry.strip().split(" ", 1) for entry in re.split(r"[,;:.]\s", sentence)]
    return {entry[0]: entry[1] for entry in entries if len(entry) == 2 and len(entry[0]) == 1}


def test_letters_of_shapes_mean_one_thing() -> None:
    legends = {
        path: legend((REPOSITORY / PACKAGE / path).read_text("utf-8")) for path in package_files()
    }
    found = [
        (path, letter, meaning)
        for path, meanings in legends.items()
        for letter, meaning in meanings.items()
        if letter in RESERVED and not meaning.startswith(RESERVED[letter])
    ]
    assert found == []
    assert sum(map(len, legends.values())) > 100


def test_docstrings_begin_as_sentences() -> None:
    """A reader who starts at a docstring needs nothing before it."""
    folders = ("sparsebalance_megatron", "tests", "benchmarks", "scripts", "examples")
    begin = re.compile(r"(Of|By|The same)\b")
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and begin.match(str(node.value.value).lstrip())
    ]
    assert not found
