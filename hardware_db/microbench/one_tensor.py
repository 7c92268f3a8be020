"""All-gather and reduce-scatter of one tensor per rank, by the name that the installed torch knows them under.

torch 2.13 calls them `all_gather_single` and `reduce_scatter_single`, and warns of the names that older releases have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(whole tensor out, this rank's part in, group=None, async_op=False)."""
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(this rank's part out, whole tensor in, group=None, async_op=False)."""
