"""Stage 1: optimizer states are sharded; weights are whole, and gradients until the step's only reduction."""

from __future__ import annotations

import torch
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
    buckets = buckets_of(named, home.wire.ranks, weight_dtypes(named, home), home.settings.bucket)
    for bucket in buckets:
        load(bucket, home, trains=True, keeps=True)
    return buckets


def weight_dtypes(named: list[tuple[str, nn.Parameter]], home: Home) -> dict[nn.Parameter, torch.dtype]:
    """The dtype that each parameter computes in."""
    return {parameter: home.settings.weights(parameter.dtype) for _, parameter in named}
