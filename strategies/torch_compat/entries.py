"""torch's private names that this package uses, as data: the parameters they are called by and the versions checked.

`problems` probes them on the installed torch and needs torch for that alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

CHECKED_ON = ("2.6", "2.9", "2.13")
"""Versions of torch on which every entry holds that is as old as they are."""

FULLY_SHARD_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module whose `fully_shard` the launcher replaces while it is imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One private name of torch."""

    module: str
    """The module to import it from."""
    name: str
    """Its name in the module, with dots."""
    takes: tuple[str, ...] | None = None
    """The parameters it is called by, in their order; others have defaults. None: it is not called, or is C++."""
    since: str | None = None
    """The first version of those checked that has it, if not all have."""
    until: str | None = None
    """The last version of those checked that has it, if not all have."""
    instances: bool = False
    """True if only instances have it: the class's source assigns it."""

    @property
    def path(self) -> str:
        """The name that a failure is reported by."""
        return f"{self.module}.{self.name}"


def _entries(
    module: str, *names: str, since: str | None = None, until: str | None = None, instances: bool = False
) -> Iterator[Entry]:
    """Yield entries of one module, each as `name` or `name(first, second)`."""
    for text in names:
        name, bracket, parameters = text.rstrip(")").partition("(")
        takes = tuple(parameters.split(", ")) if parameters else () if bracket else None
        yield Entry(module=module, name=name, takes=takes, since=since, until=until, instances=instances)


_FSDP = "torch.distributed.fsdp._fully_shard"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"

ENTRIES: tuple[Entry, ...] = (
    *_entries(
        "torch.utils._pytree",
        "tree_flatten(tree)",
        "tree_leaves(tree)",
        "tree_map(func, tree)",
        "tree_unflatten(leaves, treespec)",
    ),
    *_entries("torch.utils._pytree", "tree_map_only"),  # its first parameter has changed its name
    *_entries("torch", "_foreach_add_", "_foreach_mul_", "_foreach_sign_", "_foreach_lerp", "_foreach_lerp_"),
    *_entries("torch", "_foreach_norm", "Tensor._indices", "Tensor._version", "UntypedStorage._cdata"),
    *_entries(
        "torch.nn",
        "Module._parameters",
        "Module._modules",
        "Module._buffers",
        "Module._non_persistent_buffers_set",
        instances=True,
    ),
    *_entries("torch.nn", "Module._forward_pre_hooks", "Module._forward_hooks", instances=True),
    *_entries(
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode(allow_non_fake_inputs)",
        "UnsupportedOperatorException",
    ),
    *_entries("torch.utils._python_dispatch", "TorchDispatchMode", "_disable_current_modes()"),
    *_entries("torch._C", "DispatchKeySet", "DispatchKey.AutocastCPU", "_DisableTorchDispatch"),
    *_entries("torch._C", "_ExcludeDispatchKeyGuard", "_dispatch_get_all_op_names"),
    *_entries("torch._C", "_dispatch_has_kernel_for_dispatch_key"),
    *_entries("torch._ops", "OpOverload._schema", "OpOverload._overloadpacket", instances=True),
    *_entries("torch.autograd", "Variable._execution_engine.queue_callback"),
    *_entries("torch._C._nn", "linear"),
    *_entries("torch._C._autograd", "DeviceType", "_profiler_enabled"),
    *_entries("torch._C._autograd", "_top_saved_tensors_default_hooks", since="2.9"),
    *_entries("torch.amp", "GradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)"),
    *_entries(
        "torch.nn.utils.clip_grad",
        "clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)",
        "clip_grad_value_(parameters, clip_value, foreach)",
    ),
    *_entries(
        "torch.distributed.pipelining._backward",
        "stage_backward_input(stage_outputs_or_loss, output_grads, input_values, weights)",
        "stage_backward_weight(weights, param_groups)",
    ),
    *_entries("torch.distributed.pipelining.schedules", "_Action.computation_type"),
    *_entries(
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
    ),
    *_entries(
        "torch._functorch.aot_autograd", "aot_function(fn, fw_compiler, bw_compiler, partition_fn, decompositions)"
    ),
    *_entries(
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition(joint_module, _joint_inputs, num_fwd_outputs)",
    ),
    *_entries("torch._inductor.decomposition", "select_decomp_table()"),
    *_entries("torch.cuda.memory", "_record_memory_history", "_dump_snapshot(filename)"),
    *_entries("torch.utils.cpp_extension", "_get_build_directory(name, verbose)"),
    *_entries("torch._C._distributed_c10d", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    *_entries("torch._C._distributed_c10d", "Backend.Options._timeout"),
    *_entries("torch.distributed", "_compute_bucket_assignment_by_size"),
    *_entries("torch.distributed.distributed_c10d", "_world.pg_map"),
    *_entries("torch.distributed.device_mesh", "DeviceMesh._flatten(self, mesh_dim_name)"),
    *_entries("torch.distributed.device_mesh", "DeviceMesh._concatenate(device_mesh_list)", since="2.13"),
    *_entries("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    *_entries(
        "torch.nn.parallel",
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)",
    ),
    *_entries(_RENDEZVOUS, "_RendezvousExitOp()", "DynamicRendezvousHandler._stop_heartbeats(self)"),
    *_entries(
        _RENDEZVOUS,
        "DynamicRendezvousHandler._state_holder",
        "DynamicRendezvousHandler._op_executor",
        instances=True,
    ),
    *_entries(f"{_FSDP}._fsdp_param", "FSDPParam.init_unsharded_param(self)"),
    *_entries(
        f"{_FSDP}._fsdp_param",
        "FSDPParam._unsharded_param",
        "FSDPParam.sharded_param",
        "FSDPParam.unsharded_accumulated_grad",
        instances=True,
    ),
    *_entries(
        f"{_FSDP}._fsdp_param_group",
        "FSDPParamGroup.unshard(self, async_op)",
        "FSDPParamGroup.wait_for_unshard(self)",
        "FSDPParamGroup.post_backward(self)",
    ),
    *_entries(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup.fsdp_params", instances=True),
    *_entries(FULLY_SHARD_MODULE, "fully_shard(module, mesh, reshard_after_forward, mp_policy, offload_policy)"),
    *_entries(
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset(global_shape, mesh, placements)"
    ),
    *_entries(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator._propagate_tensor_meta_non_cached(self, op_schema)",
    ),
    *_entries(
        "torch.distributed.tensor.experimental._context_parallel._attention",
        "_enable_context_parallel_dispatcher_impl(seq_dim, mesh)",
        "_disable_context_parallel_dispatcher_impl()",
        since="2.13",
    ),
    *_entries("torch.distributed.tensor.debug", "_clear_sharding_prop_cache()", since="2.13"),
    *_entries(
        "torch.distributed.device_mesh",
        "_mesh_resources.child_to_root_mapping.clear",
        "_mesh_resources.root_to_flatten_mapping.clear",
        until="2.9",
    ),
    *_entries("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    *_entries("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache()", since="2.13"),
    *_entries("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)

OPERATIONS: dict[str, str | None] = {
    "aten._grouped_mm": "2.8",
    "aten._local_scalar_dense": None,
    "aten._log_softmax": None,
    "aten._scaled_dot_product_attention_math": None,
    "aten._scaled_dot_product_cudnn_attention": None,
    "aten._scaled_dot_product_efficient_attention": None,
    "aten._scaled_dot_product_efficient_attention_backward": None,
    "aten._scaled_dot_product_flash_attention": None,
    "aten._scaled_dot_product_flash_attention_backward": None,
    "aten._scaled_dot_product_flash_attention_for_cpu": None,
    "aten._softmax": None,
    "aten._to_copy": None,
    "aten._unsafe_view": None,
    "_c10d_functional.all_reduce_": None,
    "_c10d_functional.wait_tensor": None,
}
"""Operations with an underscore at the front, which other modules name too, and the first version that has them."""


def problems() -> list[str]:
    """Return what does not hold on the installed torch, a line for each entry."""
    import torch

    installed = _numbers(torch.__version__)
    lines = [
        f"{entry.path}: {problem}"
        for entry in ENTRIES
        if entry.since is None or _numbers(entry.since) <= installed
        if entry.until is None or installed <= _numbers(entry.until)
        if (problem := _problem(entry)) is not None
    ]
    for name, since in OPERATIONS.items():
        namespace, _, operation = name.partition(".")
        if (since is None or _numbers(since) <= installed) and not hasattr(getattr(torch.ops, namespace), operation):
            lines.append(f"torch.ops.{name}: there is no such operation")
    return [f"torch {torch.__version__}: {line}" for line in lines]


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _problem(entry: Entry) -> str | None:
    try:
        value: Any = import_module(entry.module)
    except ImportError as problem:
        return str(problem)
    *owners, last = entry.name.split(".")
    for owner in owners:
        if not hasattr(value, owner):
            return f"there is no {owner}"
        value = getattr(value, owner)
    if entry.instances:
        return None if last in _assigned(value) or hasattr(value, last) else f"{value.__name__} assigns no {last}"
    if not hasattr(value, last):
        return "it is not there"
    return None if entry.takes is None else _mismatch(getattr(value, last), entry.takes)


def _mismatch(function: Any, takes: tuple[str, ...]) -> str | None:
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in named if each.name not in takes and each.default is each.empty]
    if [each.name for each in named if each.name in takes] == list(takes) and not missing:
        return None
    return f"it takes {inspect.signature(function)}, and is called by ({', '.join(takes)})"


def _assigned(kind: type) -> set[str]:
    """Return the attributes that the source of a class assigns or annotates."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
