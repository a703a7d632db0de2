# SPDX-License-Identifier: Apache-2.0
"""What a source distribution and a wheel hold, built without a network, and that both work."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from sparsebalance_megatron import __version__

REPOSITORY = Path(__file__).parents[1]
EXTRAS = {"data", "docs", "evaluate", "fa4", "pretrained", "te", "test", "tools", "wandb"}
REQUIREMENTS = {"torch", "megatron-core", "filelock", "msgspec", "numpy", "scipy", "psutil", "tqdm"}
BUILD = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
NOT_SOURCE = ("__pycache__", "*.egg-info", "build", "dist", "runs", ".*_cache", ".hypothesis")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both unpacked, in ``wheel`` and, below one more folder, ``sdist``; built from a
    copy, since setuptools writes beside what it builds."""
    work = tmp_path_factory.mktemp("distribution")
    source = work / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", *NOT_SOURCE)
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(str(work))], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work / "sdist", filter="data")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            Path(archive.extract(member, work / "wheel")).chmod(mode | 0o600)
    return work


def names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_holds_the_repository(built: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()}
    assert tracked - names_below(next((built / "sdist").iterdir())) == set()


def test_the_wheel_holds_types_scripts_and_patches_and_nothing_beside(built: Path) -> None:
    names = names_below(built / "wheel")
    package = "sparsebalance_megatron"
    assert f"{package}/py.typed" in names
    for folder in ("examples", "patches"):
        kept = names_below(REPOSITORY / folder)
        shipped = {name for name in kept if "__pycache__" not in name}
        assert {f"{package}/shipped/{folder}/{name}" for name in shipped} <= names
    assert {name.partition("/")[0] for name in names} == {
        package,
        f"{package}-{__version__}.dist-info",
    }


def test_an_unpacked_wheel_copies_its_examples(built: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparsebalance_megatron.cli", "examples", "--copy", "here"]
    environment = {"PYTHONPATH": str(built / "wheel")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    copied = tmp_path / "here" / "examples" / "qwen2.5_3b_sft.sh"
    original = REPOSITORY / "examples" / "qwen2.5_3b_sft.sh"
    assert copied.read_bytes() == original.read_bytes()
    assert copied.stat().st_mode & 0o100
    assert list((tmp_path / "here" / "patches").glob("*.patch"))


def test_metadata(built: Path) -> None:
    (path,) = (built / "wheel").glob("*.dist-info")
    found = Distribution.at(path)
    assert found.version == __version__
    commands = found.entry_points.select(group="console_scripts")
    assert [(each.name, each.value) for each in commands] == [
        ("sparse-balance", "sparsebalance_megatron.cli:main")
    ]
    metadata = found.metadata
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    required = [line for line in found.requires if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in required} == REQUIREMENTS
    assert "torch>=2.8.0a0" in required
    assert not any(re.match(r"apex\b", line) for line in found.requires)
    page = metadata["Description"]
    assert "# SparseBalance for Megatron" in page
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
