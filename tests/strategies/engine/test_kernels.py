"""Kernels by name: what they replace, whose they are, and that training with them is the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.errors import UnknownName
from strategies.errors import CannotRun
from strategies.modules import kernels
from strategies.modules.kernels import install_kernels, read_kernels, register_kernel
from strategies.variables import REQUEST
from tests.strategies import adapter_bodies, kernel_bodies
from tests.strategies.training_bodies import Recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees another's kernels."""
    monkeypatch.setattr(kernels, "_registered", [])
    kernel_bodies.CALLS.clear()
    yield
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    llama.apply_rotary_pos_emb = getattr(llama.apply_rotary_pos_emb, "original", llama.apply_rotary_pos_emb)


def test_registered_kernels_compute_forward_and_backward() -> None:
    kernel_bodies.register()
    model = adapter_bodies.llama().train()
    usual, ids = copy.deepcopy(model), adapter_bodies.batch_of(0)
    expected = usual(input_ids=ids, labels=ids).loss
    expected.backward()
    chosen = read_kernels({"all": "mine", "linear_cross_entropy": "chunked"}, None)
    installed = install_kernels(model, chosen, CPU)
    kernel_bodies.CALLS.clear()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    for own, other in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert kernel_bodies.CALLS == {"rms_norm": 5, "swiglu": 2, "rotary": 2, "attention": 2}
    assert installed.loss == "chunked"
    assert "linear_cross_entropy chunked" in installed.sentence
    assert installed.notes == ()


def test_no_logits_are_made_in_training_and_they_are_elsewhere() -> None:
    model, ids = adapter_bodies.llama(), adapter_bodies.batch_of(0)
    install_kernels(model, {"linear_cross_entropy": "chunked"}, CPU)
    assert not hasattr(model.train()(input_ids=ids, labels=ids), "logits")
    assert model.eval()(input_ids=ids, labels=ids).logits.shape == (12, 6, adapter_bodies.VOCABULARY)
    assert model.train()(input_ids=ids).logits is not None


def test_another_dtype_is_left_to_torch() -> None:
    kernel_bodies.register()  # for fp32
    model, ids = adapter_bodies.llama().bfloat16(), adapter_bodies.batch_of(0)
    install_kernels(model, read_kernels({"rms_norm": "mine"}, None), CPU)
    kernel_bodies.CALLS.clear()
    usual = adapter_bodies.llama().bfloat16()
    assert torch.equal(model(input_ids=ids).logits, usual(input_ids=ids).logits)
    assert kernel_bodies.CALLS == {}


class _OneAdded(nn.Module):
    """A norm of Gemma's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.eps = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, (8,), 1 + self.weight, self.eps)


class OtherRMSNorm(_OneAdded):
    pass


def test_a_module_that_computes_something_else_stays() -> None:
    kernel_bodies.register()
    model = nn.Sequential(OtherRMSNorm(), nn.RMSNorm(8))
    installed = install_kernels(model, {"rms_norm": "mine", "swiglu": "mine"}, CPU)
    assert installed.kernels == {"rms_norm": "mine"}
    assert installed.notes == ("kernels: torch's own swiglu: Sequential has no module that computes it so",)
    kernel_bodies.CALLS.clear()
    model(torch.randn(2, 8))
    assert kernel_bodies.CALLS == {"rms_norm": 1}


def test_what_is_absent_is_said_in_one_line() -> None:
    model = nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8))
    on_cpu = install_kernels(model, read_kernels({"rms_norm": "liger", "layer_norm": "liger"}, None), CPU)
    assert on_cpu.notes == ("kernels: torch's own rms_norm, layer_norm: liger runs on GPUs",)
    assert install_kernels(model, read_kernels({"all": "auto"}, None), CPU).notes == ()
    assert read_kernels({"all": "torch"}, None) == {}


def _sum_for_mean(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * hidden * hidden.square().sum(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize(
    ("name", "function", "sentence"),
    [
        ("rms_norm", lambda hidden, weight, eps: hidden * 2, "gives an output that differs by"),
        ("rms_norm", _sum_for_mean, "gives an output that differs by"),
        ("rms_norm", lambda hidden, weight: hidden, "raises TypeError ("),
        ("swiglu", lambda gate, up: nn.functional.silu(gate).detach() * up, "gives a gradient of gate as None for"),
        ("rotary", lambda query, key, cos, sin: (query, key), "gives an output that differs by"),
        ("linear_cross_entropy", lambda h, w, y: (h @ w.t()).mean(), "gives an output that differs by"),
        (
            "attention",
            lambda m, q, k, v, mask, **how: (q.transpose(1, 2) * how["scaling"], None),
            "gives an output that differs by",
        ),
    ],
)
def test_a_function_that_computes_something_else_is_refused(name: str, function: Any, sentence: str) -> None:
    register_kernel(name, function, provider="mine")
    model = adapter_bodies.llama()
    with pytest.raises(CannotRun, match=f"kernels: mine's {name}, tried on a few float32 numbers on cpu, ") as refusal:
        install_kernels(model, {name: "mine"}, CPU)
    assert sentence in str(refusal.value)


def test_a_layer_norm_without_bias_is_tried_without() -> None:
    register_kernel("layer_norm", lambda x, w, b, eps: nn.functional.layer_norm(x, w.shape, w, b, eps), provider="mine")
    model = nn.Sequential(nn.LayerNorm(8, bias=False))
    assert install_kernels(model, {"layer_norm": "mine"}, CPU).kernels == {"layer_norm": "mine"}
    register_kernel("layer_norm", lambda x, w, b, eps: x * w, provider="mine")
    with pytest.raises(CannotRun, match="mine's layer_norm, tried on a few float32 numbers"):
        install_kernels(model, {"layer_norm": "mine"}, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_own_functions_are_right_in_every_dtype(dtype: torch.dtype) -> None:
    """None is refused for rounding as its dtype does."""
    model = adapter_bodies.llama().to(dtype)
    functions = {**kernel_bodies.FUNCTIONS, "linear_cross_entropy": kernels._chunked_loss}
    for name, function in functions.items():
        register_kernel(name, function, provider="mine")
    installed = install_kernels(model, read_kernels({"all": "mine"}, None), CPU)
    assert set(installed.kernels) == set(functions)


def test_wrong_names_get_the_near_ones() -> None:
    with pytest.raises(CannotRun, match="device 'gpu' is not known; use 'cuda' or 'cpu', or None for every one"):
        register_kernel("rms_norm", torch.relu, device="gpu")
    with pytest.raises(UnknownName, match="unknown kernel 'rms_nrm'; nearest: rms_norm"):
        register_kernel("rms_nrm", torch.relu)
    with pytest.raises(UnknownName, match="unknown kernel provider 'ligr'; nearest: liger"):
        read_kernels({"rms_norm": "ligr"}, None)
    with pytest.raises(CannotRun, match="liger has no attention; it has rms_norm, "):
        read_kernels({"attention": "liger"}, None)
    with pytest.raises(CannotRun, match="provider 'liger' is dsplan's own"):
        dsplan.register_kernel("rms_norm", torch.relu, provider="liger")
    with pytest.raises(CannotRun, match="None is no function"):
        register_kernel("rms_norm", None)  # type: ignore[arg-type]


def test_the_loss_of_a_plan_is_what_runs() -> None:
    assert read_kernels({}, "chunked") == {"linear_cross_entropy": "chunked"}
    assert read_kernels({}, "fused") == {"linear_cross_entropy": "liger"}
    assert read_kernels({"linear_cross_entropy": "torch"}, "fused") == {}


def test_the_command_line_comes_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUEST, '{"kernels": {"linear_cross_entropy": "chunked"}}')
    assert read_kernels({"rms_norm": "liger"}, None) == {"linear_cross_entropy": "chunked"}


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(strategy="fsdp", world_size=2, checkpointing="full"),
        Recipe(strategy="zero3", backend="native", world_size=2),
        pytest.param(Recipe(strategy="ddp", world_size=2, accumulation=2), marks=pytest.mark.slow),
    ],
    ids=["fsdp", "native zero3", "ddp"],
)
def test_training_with_kernels_is_the_same(recipe: Recipe, ranks: RankPool, one_rank: RankPool) -> None:
    expected, weights = one_rank.run(kernel_bodies.losses_with, Recipe(), {})[0]
    chosen = {**dict.fromkeys(kernel_bodies.FUNCTIONS, "mine"), "linear_cross_entropy": "chunked"}
    losses, learned = ranks.run(kernel_bodies.losses_with, recipe, chosen)[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(learned[name], weight, atol=1e-5, rtol=0)


def test_a_rotary_embedding_called_in_another_way_is_the_familys_own() -> None:
    calls: list[dict[str, Any]] = []

    def original(*tensors: torch.Tensor, **options: Any) -> str:
        calls.append(options)
        return "original"

    dispatch = kernels._Dispatch([kernels.Registered(kernel="rotary", provider="mine", function=lambda *_: "mine")])
    rotary, tensors = kernels._RotaryFunction(original, dispatch), [torch.zeros(1, 2, 2, 4)] * 4
    positions = torch.arange(2)
    assert rotary(*tensors) == rotary(*tensors, unsqueeze_dim=1) == rotary(*tensors, position_ids=None) == "mine"
    for options in ({"unsqueeze_dim": 2}, {"position_ids": positions}, {"scale": 2}):
        assert rotary(*tensors, **options) == "original"
    assert calls == [{"unsqueeze_dim": 2}, {"position_ids": positions}, {"scale": 2}]
