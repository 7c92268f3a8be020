"""Stage 1: optimizer states are sharded; weights are whole, and gradients until the step's only reduction."""

from __future__ import annotations

from torch import nn

from strategies.zero.engine import ZeroStrategy
from strategies.zero.held import Held, keep_whole
from strategies.zero.weights import Home, settle_rest


class ZeroStage1(ZeroStrategy):
    """Adds gradients up on every rank and sums them over ranks in the step's last backward pass, bucket by bucket;
    a bucket's gradients are freed as it is summed."""

    reduces_each_micro_batch = False

    def hold(self, model: nn.Module, home: Home) -> Held:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets = keep_whole(named, home)
        settle_rest(model, {parameter for _, parameter in named}, home)
        return Held(buckets, home)
