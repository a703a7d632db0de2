# SPDX-License-Identifier: Apache-2.0
"""Rules for all tests: reproducible examples, poisoned memory, no test on missing hardware."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    # Reproducible everywhere; a first example that pays for an import is not slow code.
    "sparse-balance",
    deadline=None,
    derandomize=True,
    max_examples=50,
    print_blob=True,
)
settings.load_profile("sparse-balance")


PROCESS_PATHS = (
    "attention/select/test_memory.py",
    "benchmarks/test_kernel_resources.py",
    "cli/test_report.py",
    "megatron/test_dense_models.py",
    "profile/test_command.py",
    "view/report/test_browser.py",
    "test_compat.py::test_processes",
    "test_documents.py",
    "run/test_dry_run.py",
)
"""They start processes, compile kernels, fill memory or plan many ranks."""
NIGHTLY_PATHS = (
    "hosts/",
    "test_distribution.py",
    "test_patches.py",
)
"""What they guard changes with other projects, or with the build."""
NIGHTLY_TESTS = frozenset(
    {
        "cli/test_convert.py::test_logits_are_those_of_transformers[llama-linear]",
        "cli/test_convert.py::test_logits_are_those_of_transformers[llama-plain]",
        "cli/test_convert.py::test_logits_are_those_of_transformers[qwen2-untied]",
        "cli/test_convert.py::test_scaled_rope_would_be_missed[llama-linear]",
        "run/test_collectives.py::test_collectives_of_a_layer[hierarchical-ring-False]",
        "run/test_schedule_order.py::test_observed_order_is_the_simulated_order[2-1-None]",
        "run/test_schedule_order.py::test_observed_order_is_the_simulated_order[2-2-None]",
        *(
            "run/test_training.py::"
            f"test_tuned_training_measures_every_micro_batch_and_holds_coverage[{layout}]"
            for layout in ("dp2-full-recompute", "dp2-vertical-slash", "pp2-virtual2")
        ),
    }
)
"""Cases that start training and differ little from others of the same test."""
LONGEST_FILES = ("attention/test_triton_interpreted.py", "benchmarks/", "run/")
"""Where a file takes minutes. They are begun first: processes that run files side by side then end
together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--damage", type=int, default=40, help="damaged copies of every file format to read"
    )
    parser.addoption(
        "--outcomes",
        type=Path,
        help="add a line of JSON per finished test to this file; what passed there is left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(OutcomeLog(path))


class OutcomeLog:
    """What a session that may be cut off has found so far, and where the next one goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        self._passed = {record["test"] for record in records if record["outcome"] == "passed"}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        record = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            record["error"] = report.longreprtext[-2000:]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its tier; longest files first; skip ``gpu`` where no CUDA device is
    visible."""
    for item in items:
        item.add_marker(_tier(item))
    items.sort(key=lambda item: not _path(item).startswith(LONGEST_FILES))
    # Not by keyword: names of directories are keywords too.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device is visible"))


def _tier(item: pytest.Item) -> str:
    """``nightly`` or ``process`` by marker or path, else ``unit``."""
    path = _path(item)
    if item.get_closest_marker("nightly") or path.startswith(NIGHTLY_PATHS):
        return "nightly"
    if path in NIGHTLY_TESTS:
        return "nightly"
    marked = item.get_closest_marker("process") or item.get_closest_marker("distributed")
    return "process" if marked or path.startswith(PROCESS_PATHS) else "unit"


def _path(item: pytest.Item) -> str:
    """The test's place below tests/."""
    return item.nodeid.removeprefix("tests/")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Verdicts on kernels are kept, but not where the user keeps them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.empty`` and ``empty_like`` return NaN (floats) or the least integer.

    Memory that is read before it is written then shows in every result.
    """
    import torch

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    yield


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def allocate_poisoned(*arguments: Any, **keywords: Any) -> Any:
        tensor = allocate(*arguments, **keywords)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            return tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    return allocate_poisoned
