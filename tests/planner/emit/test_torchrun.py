"""The torchrun script, run by torchrun."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from planner.emit import emit
from planner.emit.common import node_layout
from planner.emit.launchers import launch_command
from planner.errors import ContradictoryRequest
from strategies.distributed.network import find_free_port
from tests.planner.emit.consumers import launch, write
from tests.planner.emit.plans import make_plan


def test_torchrun_starts_the_ranks_and_passes_the_arguments_on(tmp_path: Path) -> None:
    write(emit(make_plan("zero3", gpus=2), "torchrun"), tmp_path)
    script = str(Path(__file__).parent / "torchrun_rank.py")
    ranks = launch(["bash", "torchrun.sh", script, "--text", "two words"], directory=tmp_path)
    same = {"arguments": ["--text", "two words"], "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    assert ranks == [{"RANK": rank, "LOCAL_RANK": rank, **same} for rank in range(2)]


@pytest.mark.slow
def test_several_nodes_meet_at_master_addr(tmp_path: Path) -> None:
    """Two nodes of one rank each, both on this machine."""
    write(emit(make_plan("ddp", gpus=2, nodes=2), "torchrun"), tmp_path)
    script = shlex.quote(str(Path(__file__).parent / "torchrun_rank.py"))
    meeting = f"MASTER_ADDR=localhost MASTER_PORT={find_free_port()}"
    both = f"export {meeting}; for node in 1 2; do bash torchrun.sh {script} & done; wait"
    ranks = launch(["bash", "-c", both], directory=tmp_path)
    assert [rank["RANK"] for rank in ranks] == [0, 1]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in ranks] == [1, 1]
    assert sorted(rank["GROUP_RANK"] for rank in ranks) == [0, 1]


def test_several_nodes_without_master_addr_say_so(tmp_path: Path) -> None:
    write(emit(make_plan("ddp", gpus=16, nodes=2), "torchrun"), tmp_path)
    script = tmp_path / "torchrun.sh"
    environment = {"PATH": "/usr/bin:/bin"}
    process = subprocess.run(["bash", str(script), "train.py"], capture_output=True, text=True, env=environment)
    assert process.returncode != 0
    assert "set MASTER_ADDR to the address of one of the nodes" in process.stderr


@pytest.mark.parametrize(
    ("gpus", "nodes", "world", "layout"),
    [(8, 1, 8, (1, 8)), (8, 1, 1, (1, 1)), (16, 2, 16, (2, 8)), (64, 8, 16, (2, 8)), (16, 2, 4, (1, 4))],
)
def test_ranks_fill_nodes(gpus: int, nodes: int, world: int, layout: tuple[int, int]) -> None:
    plan = make_plan("fsdp", gpus=gpus, nodes=nodes, dp_shard=world)
    assert node_layout(plan) == layout
    assert f"--nnodes={layout[0]} --nproc-per-node={layout[1]}" in launch_command(plan)


def test_ranks_that_fill_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ContradictoryRequest, match="12 ranks do not fill whole nodes of 8 GPUs"):
        launch_command(make_plan("fsdp", gpus=16, nodes=2, dp_shard=12))


def test_degrees_that_dsplan_run_cannot_run_are_named() -> None:
    text = emit(make_plan("fsdp", dp_shard=2, tp=2, pp=2), "torchrun")["torchrun.sh"]
    assert "sets up tensor parallel 2, pipeline parallel 2, because `dsplan run` cannot run such a plan yet" in text
