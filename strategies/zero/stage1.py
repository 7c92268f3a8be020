"""Stage 1: optimizer states are sharded; weights are whole, and gradients until the step's only reduction."""

from __future__ import annotations

from torch import nn

from strategies.zero.engine import Held, ZeroStrategy
from strategies.zero.partition import Bucket, buckets_of
from strategies.zero.weights import Home, load, settle_rest


class ZeroStage1(ZeroStrategy):
    """Adds gradients up on every rank and sums them over ranks in the step's last backward pass, bucket by bucket;
    a bucket's gradients are freed as it is summed."""

    reduces_each_micro_batch = False

    def hold(self, model: nn.Module, home: Home) -> Held:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets = keep_whole(named, home)
        settle_rest(model, {parameter for _, parameter in named}, home)
        return Held(buckets, home)


def keep_whole(named: list[tuple[str, nn.Parameter]], home: Home) -> list[Bucket]:
    """Buckets whose weights stay whole on every rank while their optimizer states are sharded."""
    buckets = buckets_for(named, home)
    for bucket in buckets:
        load(bucket, home, trains=True, keeps=True)
    return buckets


def buckets_for(named: list[tuple[str, nn.Parameter]], home: Home) -> list[Bucket]:
    """Parameters in buckets of the dtypes that they compute in."""
    dtypes = {parameter: home.settings.weights(parameter.dtype) for _, parameter in named}
    return buckets_of(named, home.wire.ranks, dtypes, home.settings.bucket, home.owners)
