"""Three hints for each function that a lecture leaves blank, made from the lecture: where to read,
what its code uses, and its skeleton."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Callable

from nanovllm.lab.course.blanks import Blank, Course
from nanovllm.lab.course.pieces import Function

_STATEMENTS = {
    ast.For: "for",
    ast.While: "while",
    ast.If: "if",
    ast.Raise: "raise",
    ast.Return: "return",
    ast.With: "with",
    ast.Assign: "assignment",
    ast.AugAssign: "assignment",
    ast.AnnAssign: "assignment",
}


def where_to_read(course: Course, blank: Blank) -> str:
    """The first hint: the section of the lecture, and the tests."""
    lecture = course.workbook(blank.lecture)
    tests = "\n".join(f"  {test}" for test in blank.tests)
    return (
        f"Read “{blank.section}” in {lecture}. It must pass these tests in {course.root}:\n{tests}"
    )


def what_it_uses(course: Course, blank: Blank) -> str:
    """The second hint: length, statements and names of the lecture's code."""
    node = _function(course, blank)
    body = ast.Module(node.body[1:], [])
    lines = (node.end_lineno or 0) - (node.body[0].end_lineno or 0)
    kinds = Counter(_STATEMENTS[type(each)] for each in ast.walk(body) if type(each) in _STATEMENTS)
    loaded, stored = (
        {
            each.id
            for each in ast.walk(body)
            if isinstance(each, ast.Name) and type(each.ctx) is kind
        }
        for kind in (ast.Load, ast.Store)
    )
    names = dict.fromkeys(
        ast.unparse(each)
        for each in ast.walk(body)
        if isinstance(each, ast.Attribute)
        or (isinstance(each, ast.Name) and each.id in loaded - stored)
    )
    plain = [name for name in names if name.replace(".", "").isidentifier() and name != "self"]
    whole = [name for name in plain if not any(other.startswith(f"{name}.") for other in plain)]
    counted = ", ".join(f"{kind}{f' × {n}' if n > 1 else ''}" for kind, n in kinds.items())
    return f"The lecture's code has {lines} lines: {counted}. It uses {', '.join(whole)}."


def skeleton(course: Course, blank: Blank) -> str:
    """The third hint: the statements of the lecture's code, without what they compute."""
    node = _function(course, blank)
    code = "\n".join(ast.unparse(_Hidden().visit(each)) for each in node.body[1:])
    return "Its skeleton, in which each ... is yours:\n" + textwrap.indent(code, "    ")


HINTS: tuple[Callable[[Course, Blank], str], ...] = (where_to_read, what_it_uses, skeleton)


class _Hidden(ast.NodeTransformer):
    """Replaces the expressions of statements by ...."""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.If() | ast.While():
                node.test = _dots()
            case ast.For():
                node.iter = _dots()
            case ast.Return() | ast.Assign() | ast.AugAssign() | ast.AnnAssign() if node.value:
                node.value = _dots()
            case ast.Raise(exc=ast.Call() as call):
                call.args = [_dots()]
            case ast.Expr(value=ast.Call() as call):
                call.args = [_dots()] * bool(call.args)
                call.keywords = []
        return self.generic_visit(node)


def _dots() -> ast.Constant:
    return ast.Constant(...)


def _function(course: Course, blank: Blank) -> Function:
    node = ast.parse(textwrap.dedent("\n".join(course.solution(blank)))).body[0]
    assert isinstance(node, Function)
    return node
