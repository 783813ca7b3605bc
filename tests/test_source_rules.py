"""Rules that the library's source keeps."""

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "specar_core"
FILES = [pytest.param(path, id=str(path.relative_to(CORE))) for path in sorted(CORE.rglob("*.py"))]


@pytest.mark.parametrize("path", FILES)
def test_imports_of_the_library_are_relative_and_only_the_command_line_prints(path):
    """ComfyUI imports it under another name; and what is on standard output is a result of the command line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        assert not any(name.split(".")[0] in ("specar_core", "nodes", "comfy") for name in names), node.lineno
        if isinstance(node, ast.Name) and node.id == "print":
            assert path.name in ("cli.py", "making.py"), f"line {node.lineno} prints"
