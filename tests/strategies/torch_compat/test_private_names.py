"""torch's private names: used in one package alone, each listed, and there on the installed version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.strategies.torch_compat import entries
from tests.strategies.torch_compat.entries import ENTRIES, OPERATIONS, Entry

ROOT = Path(__file__).parents[3]
ROOMS = ("hardware_db", "planner", "strategies", "dsplan")
COMPAT = "strategies/torch_compat/"

NAMED = {part for entry in ENTRIES for part in entry.path.split(".") if part.startswith("_")}
"""Parts of the listed names that begin with an underscore."""
OPERATION_PARTS = {part for name in OPERATIONS for part in name.split(".") if part.startswith("_")}
SHARED_NAMES = {"_buffers", "_modules", "_parameters", "_timeout"}
"""Listed names that objects of our own have too: elsewhere they are allowed on `self` and in `vars`."""
OTHER_LIBRARIES = {
    "Python": {"_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_fields", "_register_atexit"},
    "accelerate": {"_reset_state", "_validate_launch_command"},
    "deepspeed": {"_hp_mapping", "_reassign_or_swap_out_partitioned_parameters"},
    "fsspec": {"_strip_protocol"},
    "ray": {"_private"},
    "lightning": {
        "_Stateful",
        "_SubprocessScriptLauncher",
        "_checkpoint_connector",
        "_data_source",
        "_init_optimizers_and_lr_schedulers",
        "_launched",
        "_loaded_checkpoint",
        "_original_handlers",
        "_should_accumulate",
        "_signal_connector",
        "_validate_launched",
    },
    "transformers": {
        "_AllToAllState",
        "_WaitTensor",
        "_attn_implementation",
        "_expand_parallel_plan",
        "_model_mapping",
    },
    "trl": {"_get_per_token_logps_and_entropies"},
    "what dsplan puts on objects of others": {"_dsplan_engine", "_dsplan_monitor"},
}
ATTRIBUTE_CALLS = ("getattr", "hasattr", "setattr", "delattr")
FOREIGN = set().union(*OTHER_LIBRARIES.values())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


Nodes = list[ast.AST]
"""All of a module."""


def own_names(modules: dict[str, Nodes]) -> set[str]:
    """Names that begin with an underscore which the rooms define themselves."""
    nodes = [node for module in modules.values() for node in module]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def from_torch(nodes: Nodes) -> set[str]:
    """Names that a module's imports bind to torch or to something in it."""
    bound = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            bound |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def reaches(nodes: Nodes, own: set[str]) -> Iterator[str]:
    """Yield what in a module reaches into torch's private parts, with its line."""
    torch_names = from_torch(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths = [node.value] if re.fullmatch(r"torch(\.\w+)+(:[\w.]+)?", node.value) else []
        elif isinstance(node, ast.Attribute):
            if _is_reach(node, torch_names, own):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_CALLS:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in NAMED - SHARED_NAMES:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            continue
        else:
            continue
        for path in paths:
            if path.split(".")[0] == "torch" and any(map(is_private, re.split(r"[.:]", path))):
                yield f"line {node.lineno}: {path}"


def _is_reach(node: ast.Attribute, torch_names: set[str], own: set[str]) -> bool:
    if node.attr == "get_objects" and root_of(node) == "gc":
        return True
    if not is_private(node.attr) or node.attr in OPERATION_PARTS:
        return False
    owner = ast.unparse(node.value)
    if owner in ("self", "cls", "super()"):
        return node.attr in NAMED - SHARED_NAMES - own
    if root_of(node.value) in torch_names:
        return True
    return node.attr in NAMED or node.attr not in own | FOREIGN


def parsed(code: str) -> Nodes:
    return list(ast.walk(ast.parse(code)))


def modules_in(*folders: str) -> dict[str, Nodes]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): parsed(path.read_text("utf-8")) for path in paths}


def test_private_names_of_torch_are_used_in_one_package_alone() -> None:
    modules = modules_in(*ROOMS)
    own = own_names(modules)
    reached = {path: list(reaches(nodes, own)) for path, nodes in modules.items() if not path.startswith(COMPAT)}
    assert not {path: lines for path, lines in reached.items() if lines}


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.amp.grad_scaler import _MultiDeviceReplicator",
        "import torch._dynamo",
        "import torch\ntorch._foreach_add_(a, b)",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
        "tensor._local_tensor",
        "module._parameters",
        "getattr(parameter, '_unsharded_param', None)",
        "import_module('torch._functorch.aot_autograd')",
        "import gc\ngc.get_objects()",
    ],
)
def test_a_use_elsewhere_is_found(code: str) -> None:
    assert list(reaches(parsed(code), own={"_parameters", "_world"}))


@pytest.mark.parametrize(
    "code",
    ["self._parameters", "import torch\ntorch.ops.aten._to_copy", "os._exit(0)", "other._own", "'torch._C is it'"],
)
def test_what_is_not_torchs_is_left_alone(code: str) -> None:
    assert not list(reaches(parsed(code), own={"_own", "_parameters"}))


def test_every_private_name_of_the_package_is_listed() -> None:
    modules = modules_in(COMPAT)
    own = own_names(modules)
    used = {
        part
        for nodes in modules.values()
        for line in reaches(nodes, own)
        for part in re.findall(r"\b_[A-Za-z]\w*", line.partition(": ")[2])
    }
    assert used - own <= NAMED | OPERATION_PARTS


def test_what_is_listed_is_used() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / COMPAT).glob("*.py"))
    unused = [entry.path for entry in ENTRIES if entry.name.split(".")[-1] not in text]
    assert unused == []
    rooms = "".join(path.read_text("utf-8") for path in (ROOT / "strategies").rglob("*.py"))
    assert [name for name in OPERATIONS if name.split(".")[1] not in rooms] == []


def test_all_names_are_there_on_the_installed_torch() -> None:
    assert entries.problems() == []


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Entry(module="torch._gone", name="f"), "No module named 'torch._gone'"),
        (Entry(module="torch", name="_foreach_gone_"), "it is not there"),
        (Entry(module="torch.nn", name="Gone._parameters"), "there is no Gone"),
        (Entry(module="torch.nn", name="Module._gone", instances=True), "Module assigns no _gone"),
        (Entry(module="torch.utils._pytree", name="tree_leaves", takes=("values",)), "and is called by (values)"),
        (Entry(module="torch.utils._pytree", name="tree_map", takes=("func",)), "and is called by (func)"),
    ],
)
def test_a_name_that_moved_is_reported(monkeypatch: pytest.MonkeyPatch, entry: Entry, problem: str) -> None:
    monkeypatch.setattr(entries, "ENTRIES", (entry,))
    (line,) = entries.problems()
    assert line.startswith(f"torch {torch.__version__}: {entry.path}: ")
    assert line.endswith(problem)


def test_what_came_later_or_went_before_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    later = Entry(module="torch", name="_foreach_gone_", since="99.0")
    earlier = Entry(module="torch", name="_foreach_gone_", until="1.0")
    monkeypatch.setattr(entries, "ENTRIES", (later, earlier))
    assert entries.problems() == []
