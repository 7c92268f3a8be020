"""Runs a snippet of docs/how-to/migration.md on a rank of a pool."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist


def run_snippet(code: str) -> list[float]:
    """The losses that a snippet leaves; the group that it would start is the pool's."""
    if "import deepspeed" in code:
        import deepspeed

        # It would be compiled, for minutes, and serves inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    names: dict[str, list[float]] = {}
    with mock.patch.object(dist, "init_process_group"), mock.patch.dict("os.environ", {"DSPLAN_QUIET": "1"}):
        exec(compile(code, "docs/how-to/migration.md", "exec"), names)
    return names["losses"]
