"""`--exact` with modules of one's own: those that can be traced, and those that cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dsplan.cli import Cli

HARDWARE = "--gpu H100-SXM5-80GB --gpus 1 --seq-len 32 --micro-batch 4"
MODULE = '''
import torch
from torch import nn


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.pointer = x.data_ptr()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.abs().max().item()


library = torch.library.Library("exact_modules", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: 2 * x, "CPU")

KINDS = {
    "plain": lambda x: x.relu(),
    "nonzero": lambda x: x * x.nonzero().float().mean(),
    "mask": lambda x: x + x[x > 0].sum(),
    "item": lambda x: x * x.max().item(),
    "condition": lambda x: x.relu() if x.sum() > 0 else x,
    "numpy": lambda x: x * float(x.detach().numpy().sum()),
    "pointer": Reads.apply,
    "backward": Scales.apply,
    "operator": lambda x: torch.ops.exact_modules.twice(x),
    "broken": lambda x: x @ torch.zeros(3, 3),
}


class Router(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gate, self.kind = nn.Linear(64, 64), kind

    def forward(self, x):
        return KINDS[self.kind](self.gate(x))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(64), Router(kind)

    def forward(self, x):
        return x + self.router(self.norm(x))


class MyModel(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList([*(Block("plain") for _ in range(3)), Block(kind)])

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x


for kind in KINDS:
    globals()[kind] = lambda kind=kind: MyModel(kind)


class Pair(nn.Module):
    """Two inputs that nobody can guess."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 64), nn.Linear(12, 64)
        self.blocks = nn.ModuleList(Block("plain") for _ in range(3))

    def forward(self, left, right):
        x = self.left(left) + self.right(right)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.sum()}


class Scaled(MyModel):
    """Has a weight without dimensions, which FSDP2 does not shard."""

    def __init__(self):
        super().__init__("plain")
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Told(Pair):
    def example_batch(self, samples, length):
        return torch.zeros(samples, length, 8), torch.zeros(samples, length, 12)


def images():
    convolved = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    convolved(torch.zeros(2, 3, 16, 16))
    return convolved, (torch.zeros(2, 3, 16, 16), torch.zeros(2))


def misfit():
    return nn.Linear(3, 3), torch.zeros(2, 5)


def three():
    return nn.Linear(3, 3), 1, 2
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, since an operator can be defined only once."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "exact_modules.py").write_text(MODULE)
    return folder


@pytest.fixture
def module(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a Python module with a factory for each kind."""
    monkeypatch.chdir(directory)
    return "exact_modules"


@pytest.mark.parametrize("factory", ["plain", "Told"])
def test_a_module_of_ones_own_is_traced(cli: Cli, module: str, factory: str) -> None:
    command = f"estimate {HARDWARE} --json --model {module}:{factory}"
    closed, plan = cli(command).json, cli(f"{command} --exact").json
    assert plan["provenance"]["memory"] == "traced"
    assert "memory is a trace of one step of" in plan["notes"][0]
    assert not any("rule of thumb" in note for note in plan["notes"])
    assert any("rule of thumb" in note for note in closed["notes"])


IMAGES = "--gpu H100-SXM5-80GB --gpus 1 --micro-batch 64 --precision fp32 --json"


def test_a_factory_may_give_its_module_a_batch(cli: Cli, module: str) -> None:
    command = f"estimate {IMAGES} --model {module}:images"
    plan, traced = cli(command).json, cli(f"{command} --exact").json
    assert (plan["plan"]["sequence_length"], plan["workload"]["task"]) == (1, "custom")
    assert plan["provenance"]["memory"] == traced["provenance"]["memory"] == "traced"
    assert f"activations and operations are those of a trace of {module}:images" in plan["notes"][0]
    peaks = [answer["memory"]["peak_allocated_bytes"] for answer in (plan, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    # Three passes over 64 samples: two operations for each weight that an output of a convolution or of the head has.
    operations = 3 * 64 * 2 * (14 * 14 * 32 * 27 + 14 * 14 * 32 * 10)
    assert plan["throughput"]["tflops_per_gpu"] * plan["time"]["step_seconds"] == pytest.approx(operations / 1e12)


def test_what_has_no_tokens_is_counted_in_samples(cli: Cli, module: str) -> None:
    printed = cli(f"recommend --gpu H100-SXM5-80GB --gpus 2 --model {module}:images").out
    assert "the module's own task, global batch" in printed
    assert "samples/s" in printed
    assert not [word for word in ("tokens", "sequence", "causal-lm") if word in printed]


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (
            "misfit",
            "activations are a rule of thumb from exact_modules:misfit's parameters: tracing it on fake tensors",
        ),
        ("three", "the factory returned a tuple; return an nn.Module, alone or as (module, batch), a"),
    ],
)
def test_a_batch_that_does_not_fit_is_told(cli: Cli, module: str, factory: str, sentence: str) -> None:
    printed = cli(f"estimate {IMAGES} --model {module}:{factory}")
    assert sentence in printed.out + printed.err
    assert "Traceback" not in printed.err


WHERE = "MyModel.blocks.3.router"
VALUE = "aten::_local_scalar_dense (Tensor.item, or a tensor as a condition)"


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("nonzero", f"aten::nonzero in {WHERE} has a data-dependent shape"),
        ("mask", f"aten::nonzero in {WHERE} has a data-dependent shape"),
        ("item", f"{VALUE} in {WHERE} reads a value, and fake tensors have none"),
        ("condition", f"{VALUE} in {WHERE} reads a value, and fake tensors have none"),
        ("backward", f"{VALUE} in the backward pass of MyModel reads a value, and fake tensors have none"),
        ("numpy", f"exact_modules.py line 37 (<lambda>) in {WHERE} reads memory, and fake tensors have none"),
        (
            "pointer",
            f"data_ptr at exact_modules.py line 9 (forward) in {WHERE} reads memory, and fake tensors have none",
        ),
        (
            "operator",
            f"exact_modules::twice in {WHERE} has no form for fake tensors; register one with"
            " torch.library.register_fake",
        ),
        ("broken", f"{WHERE} raised RuntimeError: "),
        ("Pair", "nothing is known of Pair's input 'right'; give it a method example_batch(samples, length)"),
    ],
)
@pytest.mark.sweep(every=2)
def test_what_the_trace_cannot_follow_is_named(cli: Cli, module: str, factory: str, sentence: str) -> None:
    command = f"estimate {HARDWARE} --json --model {module}:{factory}"
    closed, printed = cli(command), cli(f"{command} --exact")
    assert (printed.status, printed.err) == (closed.status, "")
    plan = printed.json
    line = plan["notes"][0]
    assert line.startswith(f"trace: {sentence}")
    assert line.endswith("; the closed form is used, with a wider bound")
    assert "\n" not in line
    assert plan["memory"]["peak_allocated_bytes"] == closed.json["memory"]["peak_allocated_bytes"]
    assert plan["memory"]["device_used_upper_bytes"] > closed.json["memory"]["device_used_upper_bytes"]
    assert plan["provenance"] == closed.json["provenance"]


def test_what_a_strategy_cannot_do_with_a_module_is_reported_in_one_line(cli: Cli, module: str) -> None:
    line = f"estimate --gpu H100-SXM5-80GB --gpus 2 --seq-len 32 --strategy fsdp --exact --json --model {module}:Scaled"
    printed = cli(line)
    assert printed.err == ""
    assert printed.json["notes"][0].startswith("trace: Scaled raised ValueError: fully_shard doesn't support scalar")
    assert cli(line.replace("fsdp", "ddp")).json["provenance"]["memory"] == "traced"


def test_a_module_is_known_again_without_torch(cli: Cli, module: str) -> None:
    line = f"estimate {HARDWARE} --exact --json --model {module}:plain"
    first = cli(line)
    again = (
        "import sys; from dsplan.__main__ import main; status = main(sys.argv[1:]);"
        " assert 'torch' not in sys.modules; sys.exit(status)"
    )
    root = str(Path(__file__).parents[2])
    second = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {again}", *line.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout == first.out
