# SPDX-License-Identifier: Apache-2.0
"""What can be changed in a module, one small thing at a time, so that some test should fail.

A comparison loses its limit or turns round, a sum becomes a difference, a number is one more,
``and`` becomes ``or``, a function returns nothing, a statement is dropped. What only types or
messages hold (annotations, decorators, what is raised or formatted) is left as it is.
"""

import ast
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: the ``index``-th that a module allows, on a line, of a kind, in words."""

    index: int
    line: int
    kind: str
    change: str


def mutants(source: str) -> list[Mutant]:
    """Every change that a module allows, in a fixed order."""
    mutator = _Mutator(None)
    mutator.visit(ast.parse(source))
    return mutator.found


def mutated(source: str, index: int) -> str:
    """The module with one change.

    Raises:
        IndexError: it allows fewer.
    """
    mutator = _Mutator(index)
    tree = mutator.visit(ast.parse(source))
    if len(mutator.found) <= index:
        raise IndexError(f"mutant {index} of {len(mutator.found)}")
    return ast.unparse(ast.fix_missing_locations(tree))


class _Mutator(ast.NodeTransformer):
    """Counts what it could change and makes one of the changes."""

    def __init__(self, wanted: int | None) -> None:
        self.found: list[Mutant] = []
        self._wanted = wanted

    def _offer(self, kind: str, old: ast.AST, new: ast.AST, change: str = "") -> ast.AST:
        """The new node if this is the change to make, else the old one."""
        index = len(self.found)
        change = change or f"{ast.unparse(old)} -> {ast.unparse(new)}"
        self.found.append(Mutant(index=index, line=old.lineno, kind=kind, change=change))
        return ast.copy_location(new, old) if index == self._wanted else old

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = _COMPARISONS[type(node.ops[0])]
        new = ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
        return self._offer("comparison", node, new)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = _OPERATIONS.get(type(node.op))
        if other is None or _is_text(node.left) or _is_text(node.right):
            return node
        return self._offer("arithmetic", node, ast.BinOp(node.left, other(), node.right))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        return self._drop(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, bool):
            return self._offer("boolean", node, ast.Constant(not value))
        if isinstance(value, int):
            return self._offer("constant", node, ast.Constant(value + 1))
        if isinstance(value, float):
            return self._offer("constant", node, ast.Constant(2 * value if value else 1.0))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._offer("boolean", node, ast.BoolOp(other, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return self._offer("boolean", node, node.operand)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or ast.unparse(node.value) == "None":
            return node
        return self._offer("return", node, ast.Return(ast.Constant(None)))

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        self.generic_visit(node)
        return self._drop(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Only what changes something that exists: a name that is never bound shows at once."""
        self.generic_visit(node)
        changes = all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        return self._drop(node) if changes else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self._drop(node)

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return self._drop(node)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return self._drop(node)

    def _drop(self, node: ast.stmt) -> ast.AST:
        first = ast.unparse(node).splitlines()[0]
        return self._offer("statement", node, ast.Pass(), f"{first} -> dropped")

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return node
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = node.args
        arguments.defaults = [self.visit(each) for each in arguments.defaults]
        arguments.kw_defaults = [each and self.visit(each) for each in arguments.kw_defaults]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def _as_it_is(self, node: ast.AST) -> ast.AST:
        return node

    visit_Assert = visit_Import = visit_ImportFrom = visit_JoinedStr = _as_it_is
    visit_TypeAlias = _as_it_is


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
