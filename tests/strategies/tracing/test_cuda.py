"""Fake CPU tensors make the storages that CUDA's kernels are documented to make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from strategies.tracing.cuda import autocast
from strategies.tracing.cuda.as_cuda import as_cuda
from strategies.tracing.cuda.attention import Call, kernel_for
from strategies.tracing.cuda.kernels import scratch_sizes
from strategies.tracing.storage_tracker import StorageTracker

B, H, S, D = 2, 4, 96, 32
SEEDS = 2 * 512
"""Seed and offset of the random numbers, rounded up as every allocation is."""
AMPERE, ADA, TURING = (8, 0), (8, 9), (7, 5)


@pytest.fixture
def cuda() -> Iterator[None]:
    with FakeTensorMode(), as_cuda():
        yield


def heads(count: int = H, width: int = D, dtype: torch.dtype = torch.bfloat16, length: int = S) -> torch.Tensor:
    return torch.empty(B, count, length, width, dtype=dtype, requires_grad=True)


def kept(run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> int:
    """Bytes alive after a forward pass beside its inputs, the output among them."""
    with StorageTracker(inputs, fake=True) as tracker:
        before = tracker.live_bytes
        output = run()
        after = tracker.live_bytes
        assert output.requires_grad
        return after - before


def call(dtype: torch.dtype = torch.bfloat16, *, keys: int = H, width: int = D, value_width: int = 0) -> Call:
    return Call(
        query=heads(H, width, dtype),
        key=heads(keys, width, dtype),
        value=heads(keys, value_width or width, dtype),
    )


def test_the_kernel_is_the_one_that_torch_chooses(cuda: None) -> None:
    mask = torch.empty(B, 1, S, S, dtype=torch.bool)
    plain = call()
    grouped = replace(call(keys=2), grouped=True)
    assert kernel_for(plain, AMPERE) == "flash"
    assert kernel_for(plain, TURING) == "math"  # no bf16 before Ampere
    assert kernel_for(call(torch.float16), TURING) == "efficient"
    assert kernel_for(call(torch.float32), AMPERE) == "efficient"
    assert kernel_for(replace(plain, mask=mask), AMPERE) == "efficient"
    assert kernel_for(replace(plain, dropout=0.1), AMPERE) == "flash"
    assert kernel_for(grouped, AMPERE) == "flash"
    assert kernel_for(replace(grouped, mask=mask), AMPERE) == "math"
    assert kernel_for(call(keys=1), AMPERE) == "math"  # multi-query attention without being told
    assert kernel_for(call(width=192, value_width=128), AMPERE) == "efficient"
    assert kernel_for(call(width=256), AMPERE) == "flash"
    assert kernel_for(call(width=264), AMPERE) == "efficient"
    assert kernel_for(call(width=200), ADA) == "efficient"
    assert kernel_for(call(width=36), AMPERE) == "flash"  # padded to 40
    assert kernel_for(call(torch.float32, width=30), AMPERE) == "math"


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
) -> Callable[[], torch.Tensor]:
    return lambda: functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]


def test_flash_keeps_the_output_and_one_figure_per_row(cuda: None) -> None:
    tensors = heads(), heads(2), heads(2)
    size = kept(attend(*tensors, is_causal=True, enable_gqa=True, dropout_p=0.1), *tensors)
    assert size == B * H * S * D * 2 + B * H * S * 4 + SEEDS


def test_the_memory_efficient_kernel_pads_its_figures_and_keeps_a_mask(cuda: None) -> None:
    tensors = heads(length=100), heads(length=100), heads(length=100)
    mask = torch.empty(B, 1, 100, 100, dtype=torch.bool)
    additive = B * 100 * 104 * 2  # bf16, its rows padded to a multiple of 8
    size = kept(attend(*tensors, attn_mask=mask), *tensors, mask)
    assert size == pytest.approx(B * H * 100 * D * 2 + B * H * 128 * 4 + additive + SEEDS, abs=512)


def test_without_a_kernel_the_scores_are_kept(cuda: None) -> None:
    tensors = heads(), heads(1), heads(1)
    assert kept(attend(*tensors), *tensors) > B * H * S * S * 4


def test_a_learned_bias_gets_its_gradient(cuda: None) -> None:
    bias = torch.empty(1, H, S, S, dtype=torch.bfloat16, requires_grad=True)
    attend(heads(), heads(), heads(), attn_mask=bias)().sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_attention_backward_needs_room_inside(cuda: None) -> None:
    query, key, output = heads(), heads(2), heads()
    rows = B * H * 128  # 96 positions, rounded up
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    in_place = query.transpose(1, 2).contiguous().transpose(1, 2)
    alike = sum(scratch_sizes(backward, (in_place, query, query, query, in_place)))
    assert alike == rows * D * 4 + rows * 4
    assert sum(scratch_sizes(backward, (in_place, query, key, key, in_place))) == alike + 2 * B * H * S * D * 2
    assert sum(scratch_sizes(backward, (in_place, query, query, query, output))) == alike + output.nbytes
    assert not scratch_sizes(torch.ops.aten.mm.default, (query, key))


def test_dropout_keeps_a_byte_per_element(cuda: None) -> None:
    x = torch.empty(1024, 8, dtype=torch.bfloat16, requires_grad=True)
    assert kept(lambda: functional.dropout(x, 0.1), x) == x.numel() * (2 + 1)
    assert functional.dropout(x, 0.1, training=False) is x


def test_root_mean_square_norm_is_one_kernel(cuda: None) -> None:
    norm, x = nn.RMSNorm(64), torch.empty(128, 64, requires_grad=True)
    assert kept(lambda: norm(x), x, norm.weight) == x.nbytes + 128 * 4
    norm(x).sum().backward()
    assert norm.weight.grad is not None


def test_layer_norm_keeps_fp32_statistics_of_16_bit_rows(cuda: None) -> None:
    norm, x = nn.LayerNorm(64, dtype=torch.bfloat16), torch.empty(1024, 64, dtype=torch.bfloat16, requires_grad=True)
    assert kept(lambda: norm(x), x, *norm.parameters()) == x.nbytes + 2 * 1024 * 4


def test_softmax_of_half_to_float_makes_no_copy_and_of_bfloat16_one(cuda: None) -> None:
    for dtype, copies in ((torch.float16, 0), (torch.bfloat16, 1)):
        x = torch.empty(64, 64, dtype=dtype, requires_grad=True)
        with StorageTracker([x], fake=True) as tracker:
            before = tracker.live_bytes
            functional.softmax(x, -1, dtype=torch.float32)
            assert tracker.peak_bytes - before == (1 + copies) * x.numel() * 4


def autocast_dtypes(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.dtype:
    with torch.autocast("cpu", torch.bfloat16):
        return run(torch.empty(8, 8, dtype=torch.bfloat16)).dtype


def test_autocast_computes_in_fp32_what_cuda_does(cuda: None) -> None:
    in_fp32 = (
        lambda x: functional.softmax(x, -1),
        lambda x: functional.layer_norm(x, (8,)),
        lambda x: x.pow(2),
        lambda x: x.sum(),
        lambda x: functional.cross_entropy(x, torch.zeros(8, dtype=torch.long)),
        lambda x: functional.mse_loss(x, x),
    )
    assert {autocast_dtypes(run) for run in in_fp32} == {torch.float32}
    narrow = (lambda x: x.float() @ x.float(), lambda x: functional.gelu(x), lambda x: torch.cat([x, x]))
    assert {autocast_dtypes(run) for run in narrow} == {torch.bfloat16}


def test_code_that_asks_of_cuda_hears_of_autocast(cuda: None) -> None:
    assert not torch.is_autocast_enabled()
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cuda")


def test_torch_is_as_before_afterwards() -> None:
    def figures() -> tuple[torch.dtype, bool]:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.softmax(torch.zeros(2, 2, dtype=torch.bfloat16), -1).dtype, torch.is_autocast_enabled()

    before = figures()
    with FakeTensorMode(), as_cuda():
        pass
    assert figures() == before == (torch.bfloat16, False)


def listed(name: str) -> set[str]:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define {name}\(_\)(.*?)\n\n", header, re.DOTALL)
    assert body is not None
    return {
        base + ("." + overload if overload else "") for base, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    }


def test_the_autocast_lists_are_those_of_torch() -> None:
    assert listed("AT_FORALL_LOWER_PRECISION_FP") == autocast.LOWER_PRECISION
    assert listed("AT_FORALL_FP32") == autocast.FP32
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == autocast.FP32_OUTPUT
    assert listed("AT_FORALL_PROMOTE") == autocast.PROMOTE
