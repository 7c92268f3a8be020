"""The mesh of a job's ranks: who shares layers, sequences, experts, samples and states with whom."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.types.plan import Configuration, ParallelDims
from strategies.errors import CannotRun
from strategies.torch_compat.distributed import flatten

Dimension = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
"""Dimensions of the mesh, outermost first: neighbouring ranks, which one node has, share in one tp group."""
Group = Literal[
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "dp", "dp_cp", "dp_shard_cp", "expert_shard", "expert_dp"
]
"""Dimensions and what they make together: `dp` reads different samples, over `dp_cp` the gradients of ordinary
parameters are reduced and over `dp_shard_cp` their states are sharded; `expert_dp` and `expert_shard` are the same of
routed experts, of which each of `ep` ranks has its own."""

DIMENSIONS: tuple[Dimension, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_EXPERT_DIMENSIONS = ("pp", "dp_replicate", "expert_shard", "ep")
_JOINED: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "expert_dp": ("dp_replicate", "expert_shard"),
}


class Member(Protocol):
    """A process of a job: `strategies.distributed.environment.Environment`, whose words these are."""

    @property
    def rank(self) -> int:
        """Its number among all, from 0."""

    @property
    def world_size(self) -> int:
        """The number of all."""

    @property
    def local_world_size(self) -> int:
        """The number of those on its node."""

    @property
    def device(self) -> torch.device:
        """The device that its tensors lie on."""


class Mesh:
    """A rank's place among the ranks of a plan, and its process groups, made when first used in the default group.

    Every rank makes the same groups in the same order, so that what asks for one asks on every rank.

    Raises:
        CannotRun: the degrees do not make the number of ranks, or a tp group would span nodes.
    """

    def __init__(self, dims: ParallelDims, environment: Member) -> None:
        if dims.world_size != environment.world_size:
            product = " x ".join(f"{name} {getattr(dims, name)}" for name in DIMENSIONS)
            raise CannotRun(
                f"{product} = {dims.world_size} ranks and this job has {environment.world_size}; start"
                f" {dims.world_size} ranks, or change a degree"
            )
        if environment.local_world_size < environment.world_size and environment.local_world_size % dims.tp:
            raise CannotRun(
                f"tp {dims.tp} does not divide the {environment.local_world_size} ranks of a node, and its all-reduces"
                " would go between nodes in every block; use a tp that divides them"
            )
        self.dims, self.environment = dims, environment
        self._sizes: dict[str, int] = {name: getattr(dims, name) for name in (*DIMENSIONS, "ep")}
        self._sizes["expert_shard"] = dims.dp_shard * dims.cp * dims.tp // dims.ep
        self._groups: dict[str, dist.ProcessGroup] = {}

    @classmethod
    def of(cls, configuration: Configuration, environment: Member) -> Mesh:
        """Return the mesh of a plan's configuration."""
        return cls(configuration.dims, environment)

    @property
    def is_data_parallel(self) -> bool:
        """True if data parallelism is all there is: no rank shares the work on one sample with another."""
        dims = self.dims
        return dims.tp * dims.pp * dims.cp * dims.ep == 1

    def size(self, name: Group) -> int:
        """Return how many ranks a group has."""
        total = 1
        for part in _JOINED.get(name, (name,)):
            total *= self._sizes[part]
        return total

    def rank(self, name: Group) -> int:
        """Return the rank's number in its group."""
        number = 0
        coordinates = self._expert_coordinates if name in ("ep", "expert_shard", "expert_dp") else self._coordinates
        for part in _JOINED.get(name, (name,)):
            number = number * self._sizes[part] + coordinates[part]
        return number

    def group(self, name: Group) -> dist.ProcessGroup:
        """Return the rank's process group; every rank asks for the same ones in the same order."""
        if name not in self._groups:
            self._groups[name] = self._make_group(name)
        return self._groups[name]

    def ranks(self, name: Group) -> list[int]:
        """Return the global ranks of this rank's group, in order."""
        return dist.get_process_group_ranks(self.group(name))

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """Return torch's mesh of all dimensions, for what wants one."""
        sizes = tuple(self._sizes[name] for name in DIMENSIONS)
        return init_device_mesh(self.environment.device.type, sizes, mesh_dim_names=DIMENSIONS)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """Over which FSDP2 shards ordinary parameters: (dp_shard_cp), or (dp_replicate, dp_shard_cp) with replicas."""
        if self.dims.world_size == self.size("dp_shard"):
            return init_device_mesh(
                self.environment.device.type, (self.environment.world_size,), mesh_dim_names=("dp_shard",)
            )
        mesh, dims = self.device_mesh, self.dims
        if dims.cp == 1:
            return mesh["dp_replicate", "dp_shard"] if dims.dp_replicate > 1 else mesh["dp_shard"]
        if dims.dp_replicate == 1:
            return flatten(mesh["dp_shard", "cp"], "dp_shard_cp")
        # A flattened dimension cannot be taken together with another (torch 2.11).
        sizes = (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp)
        names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)["dp_replicate", "dp_shard_cp"]

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Return torch's mesh of the same ranks as routed experts see them: (pp, dp_replicate, expert_shard, ep)."""
        sizes = tuple(self._sizes[name] for name in _EXPERT_DIMENSIONS)
        return init_device_mesh(self.environment.device.type, sizes, mesh_dim_names=_EXPERT_DIMENSIONS)

    @cached_property
    def expert_shard_mesh(self) -> DeviceMesh:
        """Over which FSDP2 shards routed experts: (expert_shard), or (dp_replicate, expert_shard) with replicas."""
        mesh = self.expert_mesh
        return mesh["dp_replicate", "expert_shard"] if self.dims.dp_replicate > 1 else mesh["expert_shard"]

    def _make_group(self, name: Group) -> dist.ProcessGroup:
        # What is exchanged inside a forward or backward pass has a group of its own: gradients are all-reduced when
        # they are ready, and messages of one group would be taken for the other's.
        if self.size(name) == self.environment.world_size and (self.is_data_parallel or name.startswith("dp")):
            world = dist.group.WORLD
            assert world is not None  # the job has joined it
            return world
        parts = _JOINED.get(name, (name,))
        mesh = self.expert_mesh if name in ("ep", "expert_shard", "expert_dp") else self.device_mesh
        if len(parts) == 1:
            return mesh.get_group(name)
        return flatten(mesh[parts], name).get_group()

    @cached_property
    def _coordinates(self) -> dict[str, int]:
        return _coordinates(self.environment.rank, {name: self._sizes[name] for name in DIMENSIONS})

    @cached_property
    def _expert_coordinates(self) -> dict[str, int]:
        return _coordinates(self.environment.rank, {name: self._sizes[name] for name in _EXPERT_DIMENSIONS})


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Coordinates of a rank, the last dimension innermost."""
    coordinates: dict[str, int] = {}
    for name, size in reversed(sizes.items()):
        rank, coordinates[name] = divmod(rank, size)
    return coordinates
