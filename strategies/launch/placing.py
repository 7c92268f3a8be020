"""Whether the flags of a placement fit together, before anything is started. No torch."""

from __future__ import annotations

from planner.errors import ContradictoryRequest
from strategies.launch.settings import LauncherName, Placement, Supervision

# Which launchers read which field; the local one needs no host file because the command runs on every node.
_READ_BY: dict[str, tuple[LauncherName, ...]] = {
    "rendezvous": ("local", "accelerate"),
    "hostfile": ("deepspeed", "mpi"),
    "node_rank": ("deepspeed", "accelerate"),
    "options": ("slurm", "mpi", "deepspeed", "accelerate"),
}
_FLAGS = {"rendezvous": "--rendezvous", "hostfile": "--hostfile", "node_rank": "--node-rank"}


def check_placement(placement: Placement, supervision: Supervision) -> None:
    """Refuse flags that the launcher would not read, and several nodes that could not meet or share checkpoints.

    Raises:
        ContradictoryRequest: one line says which flag and what to do.
    """
    name = placement.launcher
    for field, launchers in _READ_BY.items():
        if getattr(placement, field) not in (None, ()) and name not in launchers:
            flag = _FLAGS.get(field, "--launcher-option")
            raise ContradictoryRequest(
                f"{flag} is for --launcher {' or '.join(launchers)}, and this run's is {name}; leave it out"
            )
    if name != "local":
        if placement.is_elastic:
            raise ContradictoryRequest(
                f"--nodes {placement.least_nodes}:{placement.most_nodes}: nodes come and go with the local launcher"
                f" only; give --launcher {name} one number"
            )
        return
    if placement.most_nodes > 1 and placement.rendezvous is None:
        raise ContradictoryRequest(
            f"--nodes {placement.most_nodes} needs --rendezvous HOST:PORT, an address of one of them that all reach,"
            " the same on every node; or name a --launcher that starts all nodes itself"
        )
    if placement.most_nodes == 1 and placement.rendezvous is not None:
        raise ContradictoryRequest("--rendezvous is where several nodes meet; add --nodes, or leave it out")
    if placement.most_nodes > 1 and not supervision.checkpoint_directory:
        raise ContradictoryRequest(
            "several nodes need --checkpoint-dir, a directory that all of them see, to save together and to go on from"
        )
