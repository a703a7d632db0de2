# SPDX-License-Identifier: Apache-2.0
"""How many small mistakes in the package its tests find.

    python scripts/mutation.py --json benchmarks/results/mutation.json --minutes 10

Draws changes (``mutants.py``) evenly over the files of some folders, makes one at a time in a copy
of the repository, and runs the tests of the changed file: ``tests/plan/test_x.py`` for
``plan/x.py`` and those that ``TESTS`` adds. A change after which all of them pass has survived. The
same command goes on where the last one stopped; --again runs survivors anew, after tests were
added.

Tests are run in processes forked from this one, which has imported the libraries that they need.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mutants import mutants, mutated

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "sparsebalance_megatron"
LIBRARIES = ("numpy", "scipy.optimize", "torch", "hypothesis", "pytest", "transformers")
NEEDED = (
    *(PACKAGE, "tests", "benchmarks", "docs", "research", "scripts", "examples"),
    "pyproject.toml",
)
"""What tests read."""
LEAST_LIMIT_S = 10.0
"""CPU time that a change may take, beside three times what the tests take without it."""
_MEMORY_BYTES = 14 << 30
CP_SIZES = "tests/plan/test_cp_sizes.py"
PLANS = "tests/plan/test_plans.py"
SEGMENTS = "tests/plan/test_segments.py"
CONTRACT = "tests/attention/kernels/test_contract.py"
ATTENTION = "tests/attention/test_api.py"
TESTS: dict[str, tuple[str, ...]] = {
    "plan/budgets/": (
        *("tests/plan/budgets/test_policy.py", "tests/plan/budgets/test_units.py"),
        *("tests/plan/test_layer_budgets.py", "tests/plan/test_lockstep_plans.py"),
    ),
    "plan/search/cp_size_start": (CP_SIZES,),
    "plan/search/balance": (
        *("tests/plan/search/test_balance.py", "tests/plan/test_golden_plans.py"),
    ),
    "plan/search/segments": (SEGMENTS, "tests/plan/test_segments_shared.py"),
    "plan/search/": (
        *("tests/plan/search/test_annealing.py", "tests/plan/search/test_moves.py"),
        *(CP_SIZES, "tests/plan/test_candidates.py"),
    ),
    "plan/step_costs": (CP_SIZES, "tests/plan/test_step_costs.py"),
    "plan/step_problem": (PLANS, "tests/plan/test_lockstep_plans.py"),
    "plan/arrangement": (CP_SIZES,),
    "plan/bounds": (PLANS, CP_SIZES, SEGMENTS),
    "plan/candidates": (CP_SIZES, "tests/plan/test_lockstep_plans.py"),
    "plan/planner": ("tests/learn/test_scheduler.py", "tests/plan/test_golden_plans.py", CP_SIZES),
    "plan/groups": (CP_SIZES,),
    "plan/pipeline/": ("tests/plan/pipeline/test_simulator.py", CP_SIZES),
    "plan/segments": (
        *(SEGMENTS, "tests/plan/test_segments_lockstep.py", "tests/plan/test_segments_shared.py"),
    ),
    "plan/": (
        *(PLANS, "tests/plan/test_planner.py", "tests/learn/test_scheduler.py"),
        "tests/plan/test_golden_plans.py",
    ),
    "cost/table": ("tests/cost/test_model.py",),
    "cost/": (
        *("tests/cost/test_model.py", "tests/cost/test_fit.py"),
        "tests/learn/test_calibration.py",
    ),
    "attention/kernels/reference": (CONTRACT, ATTENTION),
    "attention/sequence/": (
        CONTRACT,
        "tests/attention/sequence/test_earlier_segments.py",
        "tests/attention/sequence/test_slice.py",
        "tests/attention/sequence/test_exchange.py",
    ),
    "attention/select/ranking": ("tests/attention/select/test_vertical_slash.py",),
    "attention/select/vertical_slash": ("tests/attention/select/test_vertical_slash.py",),
    "attention/select/": (
        *("tests/attention/select/test_block_topk.py", CONTRACT),
        "tests/attention/select/test_streaming.py",
    ),
    "attention/kernels/dense": (CONTRACT,),
    "attention/": (CONTRACT, ATTENTION),
    "data/documents": (
        *("tests/data/test_samples.py", "tests/data/test_blend.py", "tests/data/test_prepare.py"),
    ),
    "data/records": ("tests/bad_inputs/test_records.py", "tests/data/test_prepare.py"),
    "data/prepare": (
        *("tests/data/test_prepare.py", "tests/data/test_conversations.py"),
        "tests/bad_inputs/test_models.py",
    ),
    "data/data_set": ("tests/data/test_samples.py", "tests/data/test_blend.py"),
    "learn/planned_step": ("tests/learn/test_scheduler.py", "tests/learn/test_host_planner.py"),
    "learn/": (
        *("tests/learn/test_scheduler.py", "tests/learn/test_calibration.py"),
        *("tests/learn/test_measurement.py", "tests/learn/test_host_planner.py"),
    ),
    "log/files": ("tests/log/test_files.py", "tests/log/test_reader.py"),
    "log/": ("tests/log/test_reader.py", "tests/log/test_records.py"),
    "run/": (
        *("tests/run/test_micro_batches.py", "tests/megatron/test_timing.py"),
        *("tests/run/test_forward_step.py", "tests/run/test_sinks.py"),
        *("tests/run/test_resume.py", "tests/cli/test_dry_run.py", "tests/run/test_segments.py"),
    ),
    "data/samples": ("tests/data/test_samples.py", "tests/data/test_blend.py"),
    "data/": (
        *("tests/data/test_samples.py", "tests/data/test_prepare.py"),
        "tests/data/test_documents.py",
    ),
}
"""Tests that are run beside those that mirror a file, by the beginning of its path; the first that
fits counts."""
LEFT_OUT = (
    "attention/kernels/triton/",
    "attention/select/router_kernels.py",
)
"""Kernels: on a CPU they are interpreted, minutes a time."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    deadline_s = time.monotonic() + 60 * options.minutes
    state = _begin(options)
    with tempfile.TemporaryDirectory() as directory:
        try:
            left = _judge(state, options, Path(directory), deadline_s)
        except BrokenTestsError as error:
            raise SystemExit(str(error)) from None
    if left:
        print(f"{left} are left: the same command goes on")
    print(json.dumps(_score(state["drawn"])))
    return 0


class BrokenTestsError(RuntimeError):
    """Tests that cannot be run, or that fail with nothing changed."""


def _judge(
    state: dict[str, Any], options: argparse.Namespace, directory: Path, deadline_s: float
) -> int:
    """Give the changes that lack one an outcome, each process in a copy of its own.

    Returns:
        How many it did not come to.
    """
    wanted = _wanted(state, options.again)
    # Forked, since a process that has imported the libraries is what tests are started from.
    forked = multiprocessing.get_context("fork")
    judge = partial(_judged, tests_s=state["tests_s"], options=options, deadline_s=deadline_s)
    left = 0
    with ProcessPoolExecutor(options.processes, forked, _begin_process, (directory,)) as pool:
        for mutant, (outcome, tests_s) in zip(wanted, pool.map(judge, wanted), strict=True):
            state["tests_s"] |= tests_s
            if outcome is None:
                left += 1
                continue
            mutant |= outcome
            _write(options.json, state)
            print(f"{mutant['outcome']}: {mutant['path']}:{mutant['line']}: {mutant['change']}")
    return left


def _begin_process(directory: Path) -> None:
    global _copy
    _copy = copied(directory / str(os.getpid()))


_copy = Path()
"""Copy of the repository, in which this process makes changes."""


def _judged(
    mutant: dict[str, Any],
    *,
    tests_s: dict[str, float],
    options: argparse.Namespace,
    deadline_s: float,
) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """The outcome of a change, unless it is too late, and how long which tests take."""
    if time.monotonic() > deadline_s:
        return None, {}
    _tests_s.update(tests_s)
    return _outcome(_copy, mutant, _tests_s, options.longest_s), _tests_s


_tests_s: dict[str, float] = {}
"""CPU seconds of test files with nothing changed, as far as this process knows."""


def _begin(options: argparse.Namespace) -> dict[str, Any]:
    """What the file holds, if it is of the same draw; else a new draw."""
    drawn = [_described(path, index) for path, index in sample(files(options.folders), options)]
    state: dict[str, Any] = {"seed": options.seed, "folders": options.folders, "tests_s": {}}
    state["drawn"] = drawn
    if options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))
        state["tests_s"] = known["tests_s"]
        outcomes = {_key(old): old for old in known["drawn"]}
        for mutant in drawn:
            mutant |= outcomes.get(_key(mutant), {})
    return state


def _key(mutant: dict[str, Any]) -> tuple[str, int, int, str]:
    return mutant["path"], mutant["index"], mutant["line"], mutant["change"]


def files(folders: Iterable[str]) -> list[str]:
    """Files of packages, relative to the package."""
    root = REPOSITORY / PACKAGE
    found = [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
    ]
    return sorted(path for path in found if not path.startswith(LEFT_OUT))


def sample(paths: Sequence[str], options: argparse.Namespace) -> list[tuple[str, int]]:
    """Evenly over files and lines, from a random start; then shuffled, so that a part is a sample
    too."""
    every = [(path, mutant.index) for path in paths for mutant in mutants(_source(path))]
    generator = random.Random(options.seed)
    step = max(1.0, len(every) / options.sample)
    start = generator.uniform(0, step)
    drawn = [every[int(start + n * step)] for n in range(math.ceil((len(every) - start) / step))]
    generator.shuffle(drawn)
    print(f"{len(drawn)} of {len(every)} possible changes in {len(paths)} files")
    return drawn


def tests_of(path: str) -> list[str]:
    """The test files of a file of the package, its mirror first."""
    name = Path(path)
    mirror = (Path("tests") / name.parent / f"test_{name.name}").as_posix()
    beside = next(tests for begin, tests in TESTS.items() if path.startswith(begin))
    mirrors = [mirror] if (REPOSITORY / mirror).exists() else []
    return [*mirrors, *(test for test in beside if test != mirror)]


def _described(path: str, index: int) -> dict[str, Any]:
    return {"path": path, **asdict(mutants(_source(path))[index])}


def _source(path: str) -> str:
    return (REPOSITORY / PACKAGE / path).read_text(encoding="utf-8")


def copied(directory: Path) -> Path:
    """A copy of what the tests need, without compiled files, which could be older than a change."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    directory.mkdir(parents=True, exist_ok=True)
    for name in NEEDED:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, directory / name, ignore=ignored)
        else:
            shutil.copy(REPOSITORY / name, directory / name)
    return directory


def _wanted(state: dict[str, Any], again: bool) -> list[dict[str, Any]]:
    open_outcomes = {None, "survived", "untested"} if again else {None}
    return [mutant for mutant in state["drawn"] if mutant.get("outcome") in open_outcomes]


def _outcome(
    copy: Path, mutant: dict[str, Any], tests_s: dict[str, float], longest_s: float
) -> dict[str, Any]:
    """Whether a test file kills it, and which; "untested" if not all that could have were run.

    Args:
        tests_s: CPU seconds of test files with nothing changed; those that lack are measured.
        longest_s: test files that take longer are not run.
    """
    path = copy / PACKAGE / mutant["path"]
    original = path.read_text(encoding="utf-8")
    outcome = "survived"
    for test in tests_of(mutant["path"]):
        if test not in tests_s:
            tests_s[test] = _baseline_s(copy, test)
        if tests_s[test] > longest_s:
            outcome = "untested"
            continue
        path.write_text(mutated(original, mutant["index"]), encoding="utf-8")
        try:
            code, _ = run_tests(copy, test, limit_s=LEAST_LIMIT_S + 3.0 * tests_s[test])
        finally:
            path.write_text(original, encoding="utf-8")
        if code:
            return {"outcome": "killed", "by": test}
    return {"outcome": outcome}


def _baseline_s(copy: Path, test: str) -> float:
    """CPU seconds of a test file with nothing changed, which must pass."""
    code, seconds = run_tests(copy, test, limit_s=300.0)
    if code:
        raise BrokenTestsError(f"{test}: fails with nothing changed (exit code {code})")
    return round(seconds, 1)


def run_tests(copy: Path, test: str, *, limit_s: float) -> tuple[int, float]:
    """Run a test file until its first failure, in a process of its own.

    Args:
        limit_s: CPU seconds; ten times as many may pass on the clock.

    Returns:
        pytest's exit code, negative where a signal ended it, and the CPU seconds that it took.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become_pytest(copy, test, limit_s)
    deadline_s = time.monotonic() + 10.0 * limit_s
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline_s:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(status)
    if code in (3, 4, 5):
        raise BrokenTestsError(f"{test}: pytest could not run it (exit code {code})")
    return code, usage.ru_utime + usage.ru_stime


def _become_pytest(copy: Path, test: str, limit_s: float) -> None:
    """Never returns."""
    code = 3
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.chdir(copy)
        kept = {str(REPOSITORY), str(REPOSITORY / "scripts")}
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in kept)]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
        limits = {resource.RLIMIT_AS: _MEMORY_BYTES, resource.RLIMIT_CPU: math.ceil(limit_s)}
        for limit, most in limits.items():
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        # Processes that tests spawn would import this script anew.
        sys.modules["__main__"] = ModuleType("__main__")
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]))
    finally:
        os._exit(code)


def _write(path: Path, state: dict[str, Any]) -> None:
    written = {**state, **_score(state["drawn"]), "drawn": state["drawn"]}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _score(drawn: Iterable[dict[str, Any]]) -> dict[str, Any]:
    outcomes = Counter(mutant["outcome"] for mutant in drawn if "outcome" in mutant)
    judged = outcomes["killed"] + outcomes["survived"]
    share = {"score": outcomes["killed"] / judged} if judged else {}
    interval = {"interval_95": wilson(outcomes["killed"], judged)} if judged else {}
    return {"outcomes": dict(outcomes), **share, **interval}


def wilson(found: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    z = 1.959964
    share, spread = found / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return middle - half, middle + half


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="what was found, and goes on")
    parser.add_argument("--folders", nargs="+", default=["plan", "cost", "attention", "data"])
    parser.add_argument("--sample", type=int, default=200, help="changes to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no change after")
    parser.add_argument(
        "--longest-s", type=float, default=150.0, help="test files that take longer are not run"
    )
    parser.add_argument("--processes", type=int, default=1, help="changes judged side by side")
    parser.add_argument("--again", action="store_true", help="run anew what was not killed")
    return parser.parse_args(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
