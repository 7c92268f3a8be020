"""Stage 2: gradients are sharded too: each micro-batch's are summed over ranks and freed while backward goes on."""

from __future__ import annotations

from strategies.zero.stage1 import ZeroStage1


class ZeroStage2(ZeroStage1):
    """Adds up this rank's part of the gradients; no rank ever holds more of the rest than two buckets."""

    reduces_each_micro_batch = True
