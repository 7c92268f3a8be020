"""Whether a script keeps its place in `client_state`, read from its source without running it.

An automatic checkpoint is taken between the script's lines and cannot know what the script would have handed over. A
script that reads `client_state` after loading would go on from a wrong place.
"""

from __future__ import annotations

import ast
from pathlib import Path


def reads_client_state(script: Path) -> bool:
    """Whether a script uses the second thing that `load_checkpoint` returns; False for what cannot be read."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    taken: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _loads(node.value):
            for target in node.targets:
                second = target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else None
                taken |= {second.id} if isinstance(second, ast.Name) else set()
        elif isinstance(node, ast.Subscript) and _loads(node.value):
            taken |= set() if isinstance(node.slice, ast.Constant) and node.slice.value == 0 else read
    return bool(taken & read)


def _loads(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_checkpoint"
