# SPDX-License-Identifier: Apache-2.0
"""Nothing in the package runs what it reads: no code from files, models or command lines.

A Megatron checkpoint's ``.metadata`` is a pickle; one class reads it, and knows which names it may
hold (tests/megatron/test_saved_model.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "sparsebalance_megatron"
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})
ATTRIBUTES = frozenset({"os.system", "os.popen", "torch.load", "yaml.load"})


def found_in(source: str) -> Iterator[str]:
    """What a file should not do, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            for name in modules:
                if name.partition(".")[0] in MODULES:
                    yield f"line {node.lineno}: imports {name}"
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in CALLS:
            yield f"line {node.lineno}: calls {function.id}"
        method = function.attr if isinstance(function, ast.Attribute) else None
        called = ast.unparse(function)
        if called in ATTRIBUTES:
            yield f"line {node.lineno}: calls {called}"
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        for name in ("shell", "trust_remote_code", "allow_pickle"):
            value = given.get(name)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
                yield f"line {node.lineno}: {name} is not False"
        if method == "from_pretrained" and "trust_remote_code" not in given:
            yield f"line {node.lineno}: from_pretrained without trust_remote_code=False"


def test_the_package_runs_nothing_that_it_reads() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := list(found_in(path.read_text("utf-8"))))
    }
    (only,) = found.pop("megatron/saved_model.py")
    assert only.endswith("imports pickle")
    assert found == {}
    source = (PACKAGE / "megatron/saved_model.py").read_text("utf-8")
    assert set(re.findall(r"pickle\.(\w+)", source)) == {"Unpickler", "UnpicklingError"}
