# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: what is changed, what is not, and a run on a package whose tests know half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """scripts/mutants.py and scripts/mutation.py."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import mutants
        import mutation

        yield mutants, mutation
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x = a < b", ["a < b -> a <= b"]),
        ("x = a is not b", ["a is not b -> a is b"]),
        ("x = a // b", ["a // b -> a * b"]),
        ("x = 'a' + b", []),
        ("x = 3", ["3 -> 4"]),
        ("x = 0.0", ["0.0 -> 1.0"]),
        ("x = True", ["True -> False"]),
        ("x = a and b", ["a and b -> a or b"]),
        ("x = not a", ["not a -> a"]),
        ("def f():\n    return x", ["return x -> return None"]),
        ("def f():\n    return None", []),
        ("f(x)", ["f(x) -> dropped"]),
        ("x += y", ["x += y -> dropped"]),
        ("x.y = z", ["x.y = z -> dropped"]),
        ("raise ValueError(f'{1 + 2}')", ["raise ValueError(f'{1 + 2}') -> dropped"]),
        ("for x in y:\n    continue", ["continue -> dropped"]),
        ("'''Text.'''\nimport a\nassert a > 1\nx: Literal[1]", []),
        ("@f(1)\ndef g(x: Literal[1] = 2) -> Literal[3]: ...", ["2 -> 3"]),
        ("@f(1)\nclass G:\n    x: Literal[1] = 2", ["2 -> 3"]),
        ("if TYPE_CHECKING:\n    x = 1", []),
    ],
)
def test_what_can_be_changed(scripts: Any, source: str, changes: list[str]) -> None:
    mutants, _ = scripts
    assert [mutant.change for mutant in mutants.mutants(source)] == changes


def test_one_change_at_a_time(scripts: Any) -> None:
    mutants, _ = scripts
    source = "x = a + 1\nif x > 2:\n    f(x)"
    found = [mutants.mutated(source, mutant.index) for mutant in mutants.mutants(source)]
    assert found == [
        "x = a + 2\nif x > 2:\n    f(x)",
        "x = a - 1\nif x > 2:\n    f(x)",
        "x = a + 1\nif x > 3:\n    f(x)",
        "x = a + 1\nif x >= 2:\n    f(x)",
        "x = a + 1\nif x > 2:\n    pass",
    ]
    with pytest.raises(IndexError):
        mutants.mutated(source, 5)


def test_every_file_has_tests_that_exist(scripts: Any) -> None:
    _, mutation = scripts
    for path in mutation.files(["plan", "cost", "attention", "data"]):
        found = mutation.tests_of(path)
        assert found and all((REPOSITORY / test).is_file() for test in found), path
        assert len(found) == len(set(found))


def test_the_interval_is_wilsons(scripts: Any) -> None:
    """Wilson's worked example: 10 of 10 leave room below, none above."""
    _, mutation = scripts
    low, high = mutation.wilson(10, 10)
    assert (low, high) == (pytest.approx(0.7225, abs=1e-4), pytest.approx(1.0))
    assert mutation.wilson(5, 10) == (
        pytest.approx(0.2366, abs=1e-4),
        pytest.approx(0.7634, abs=1e-4),
    )


def small_repository(folder: Path, name: str) -> Path:
    """A room of one file, whose tests know a limit and not what lies past it."""
    room, tests = folder / name / "plan", folder / "tests" / "plan"
    for each in (room, tests, folder / "scripts"):
        each.mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (room / "__init__.py").touch()
    (room / "limit.py").write_text(
        "def limited(x):\n    if x > 3:\n        return 3\n    while x < 0:\n        x += 1\n"
        "    return x\n"
    )
    (tests / "test_limit.py").write_text(
        f"from {name}.plan.limit import limited\n\n\n"
        "def test_limit():\n    assert [limited(x) for x in (-2, 3, 4)] == [0, 3, 3]\n"
    )
    for script in ("mutation.py", "mutants.py"):
        (folder / "scripts" / script).write_text((SCRIPTS / script).read_text("utf-8"))
    return folder


def test_a_whole_run_goes_on_where_it_was_cut_off(tmp_path: Path, scripts: Any) -> None:
    _, mutation = scripts
    folder = small_repository(tmp_path, mutation.PACKAGE)
    settings = (
        "import sys, mutation; mutation.LIBRARIES = (); mutation.LEAST_LIMIT_S = 2.0; "
        "mutation.TESTS = {'plan/': ()}; "
        f"mutation.NEEDED = ({mutation.PACKAGE!r}, 'tests'); sys.exit(mutation.main())"
    )

    def run(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-c", settings, "--json", "found.json", "--rooms", "plan"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env={"PYTHONPATH": str(folder / "scripts"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found

    found = run("--sample", "100")
    outcomes = {mutant["change"]: mutant["outcome"] for mutant in found["drawn"]}
    assert outcomes == {
        "x > 3 -> x >= 3": "survived",  # three is the limit itself
        "3 -> 4": "killed",
        "return 3 -> return None": "killed",
        "x < 0 -> x <= 0": "killed",
        "0 -> 1": "killed",
        "1 -> 2": "survived",  # an even number of steps below zero
        "x += 1 -> dropped": "killed",  # by its time limit
        "return x -> return None": "killed",
    }
    test = folder / "tests" / "plan" / "test_limit.py"
    test.write_text(test.read_text().replace("(-2, 3, 4)] == [0,", "(-1, 3, 4)] == [0,"))
    again = run("--sample", "100", "--again", "--processes", "2")
    assert {m["change"] for m in again["drawn"] if m["outcome"] == "survived"} == {
        "x > 3 -> x >= 3"
    }
    assert again["outcomes"] == {"killed": 8, "survived": 1}
