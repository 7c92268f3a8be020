"""Commands of the nodes of a submitted job: `dsplan run`, which resumes what its node's directory holds.

The variables that tell a node of the others are those of torchrun's flags (`PET_`), which Kubeflow's torch runtime
sets.
"""

from __future__ import annotations

PORT = 29400
"""Where the nodes of a job meet on its first one, unless they are told."""
NODE_RANK, NODE_ADDRESS, NODE_PORT = "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
"""A node's number, and address and port of the first one."""
PLAN_VARIABLE = "DSPLAN_PLAN"
"""The text of the plan of a run, on its nodes."""
SAVED = 75
"""Exit status of `dsplan run` that saved and was told to stop."""
REFUSED = 2
"""Exit status of `dsplan run` for what no repetition mends."""

_START = """\
set -eu
run=$1 nodes=$2; shift 2
directory=$run/node${PET_NODE_RANK:-${RANK:-0}}
first=${PET_MASTER_ADDR:-${MASTER_ADDR:-localhost}}:${PET_MASTER_PORT:-${MASTER_PORT:-%(port)d}}
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
mkdir -p "$directory"
how=--run-dir
if [ -e "$directory/launch.json" ]; then
    how=--resume
    set --
elif [ -n "${%(plan)s:-}" ]; then
    printf '%%s' "$%(plan)s" > "$directory/requested-plan.yaml"
    set -- --plan "$directory/requested-plan.yaml" "$@"
fi
if [ "$nodes" -gt 1 ]; then
    set -- --nodes "$nodes" --rendezvous "$first" --checkpoint-dir "$run/checkpoints" "$@"
fi
exec dsplan run "$how" "$directory" "$@"
"""


def node_command(run_directory: str, nodes: int, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a node that runs `dsplan run WORDS`, and resumes what its node's directory holds.

    The words are those of `dsplan run` without a run directory, a plan, and nodes. A node's directory is
    RUN_DIRECTORY/nodeRANK, and nodes save together in RUN_DIRECTORY/checkpoints unless the words say where.
    """
    script = _START % {"port": PORT, "plan": PLAN_VARIABLE}
    return ("sh", "-c", script, "dsplan", run_directory, str(nodes), *words)


_SAVE = """\
process=$(cat %s 2> /dev/null) || exit 0
is_there() { tr '\\0' ' ' 2> /dev/null < "/proc/$process/cmdline" | grep -q 'dsplan run'; }
if is_there; then kill -TERM "$process"; fi
while is_there; do sleep 0.2; done
"""


def save_command(process_file: str) -> str:
    """Return a shell script that asks a node's `dsplan run` to save, and ends when that has.

    Asking one node is enough: all save together. `process_file` holds the number of the process, and is a path for the
    shell.
    """
    return _SAVE % process_file
