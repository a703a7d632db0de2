# SPDX-License-Identifier: Apache-2.0
"""Rules for all tests: reproducible examples, poisoned memory, no test on missing hardware."""

from argparse import ArgumentParser
from pathlib import Path

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
    "cli/test_plan.py",
    "cli/test_logged_runs.py",
    "test_distribution.py",
    "test_supported.py",
    "megatron/test_dense_models.py",
    "profile/test_profile.py",
    "cli/test_dry_run.py",
)
"""They start processes, compile kernels, fill memory or plan many ranks."""
NIGHTLY_PATHS = ("test_pages.py", "test_patches.py")
"""What they guard changes with other projects, or with pages."""
LONGEST_FILES = ("attention/kernels/test_triton_interpreted.py", "benchmarks/", "run/")
"""Where a file takes minutes. They are begun first: processes that run files side by side then end
together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--damage", type=int, default=40, help="damaged copies of every file format to read"
    )


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
    marked = item.get_closest_marker("process") or item.get_closest_marker("distributed")
    return "process" if marked or path.startswith(PROCESS_PATHS) else "unit"


def _path(item: pytest.Item) -> str:
    """The test's place below tests/."""
    return item.nodeid.removeprefix("tests/")


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that most runs train on."""
    from harness import long_tailed_lengths, write_documents

    prefix = tmp_path_factory.mktemp("documents") / "train"
    return write_documents(prefix, long_tailed_lengths(60, longest=250))


@pytest.fixture(scope="session")
def megatron_parser() -> ArgumentParser:
    """Megatron's own, with the plugin's flags and defaults."""
    from megatron.training.arguments import add_megatron_arguments

    from sparsebalance_megatron.megatron.arguments import args_provider

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return args_provider(enabled=True, on_cpu=False)(parser)


@pytest.fixture
def torch_without_cpu_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of a test install of the CPU adapter what answers for ``torch.cuda``, until it ends:
    the adapter serves whole processes and cannot be removed."""
    import torch

    from sparsebalance_megatron.megatron import cpu

    def install() -> None:
        for name, (replacement, _) in cpu._cuda_replacements().items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch.cuda, cpu._INSTALLED, True, raising=False)

    monkeypatch.setattr(cpu, "install", install)
