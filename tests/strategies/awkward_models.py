"""Models that strategies stumble over, each small, and how each is trained for a few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

WIDTH = 10
BATCH = 12


class Block(nn.Module):
    """Two layers around a nonlinearity, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList([Block() for _ in range(count)])


class Stack(nn.Module):
    """Blocks and a head; `forward` is the mean square of what comes out."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = nn.Linear(WIDTH, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.features(x)).square().mean()


class SharedBlocks(Stack):
    """One block in three places, as ALBERT has it."""

    def __init__(self) -> None:
        block = Block()
        super().__init__(nn.ModuleList([block, block, Block()]))


class CalledTwice(Stack):
    """Every block runs twice, the first time on another input."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(super().features(x / 2) + x)


class Branching(Stack):
    """A block that all ranks leave out in every second step, and a head that never has a gradient."""

    def __init__(self) -> None:
        super().__init__(_blocks())
        self.unused = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, skips: bool = False) -> Any:
        for index, block in enumerate(self.blocks):
            x = x if skips and index == 1 else block(x)
        return self.head(x).square().mean()


class Normalised(Stack):
    """Batch normalisation, whose statistics are buffers, and a dropout that does nothing."""

    def __init__(self) -> None:
        super().__init__(_blocks())
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.0)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().features(self.norm(x)))


class Outputs(NamedTuple):
    loss: torch.Tensor
    parts: dict[str, list[torch.Tensor]]


class Opaque:
    """An output that is no container torch knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class OpaqueBlock(Block):
    def forward(self, x: Any) -> Any:
        return Opaque(super().forward(x.hidden))


class Structured(Stack):
    """Blocks that hand on objects, and a forward that returns a named tuple with dictionaries of lists."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([OpaqueBlock() for _ in range(3)]))

    def forward(self, x: torch.Tensor) -> Outputs:
        hidden = self.features(Opaque(x)).hidden  # type: ignore[arg-type, attr-defined]
        out = self.head(hidden)
        return Outputs(out.square().mean(), {"hidden": [hidden, out], "none": []})


class Recurrent(Stack):
    """An LSTM, whose module keeps a list of its weights, and a weight that is computed in every forward."""

    def __init__(self) -> None:
        super().__init__(_blocks(2))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(self.lstm(x.unsqueeze(1).expand(-1, 4, -1))[0][:, -1])


class Attending(Stack):
    """torch's own transformer layers, which read their children's weights without calling them."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        super().__init__(encoder.layers)
        self.encoder = encoder

    def features(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(x.unsqueeze(1) * torch.ones(4, 1))
        return hidden.mean(1)


class Adapted(Stack):
    """Frozen blocks with small trained matrices beside them."""

    def __init__(self) -> None:
        super().__init__(_blocks())
        self.blocks.requires_grad_(False)
        for block in self.blocks:
            block.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
            block.register_forward_hook(lambda module, inputs, output: output + module.adapter(inputs[0]))


class Penalised(Stack):
    """The loss contains the gradient of the output by the input, as in gradient penalties."""

    def __init__(self) -> None:
        super().__init__(_blocks())

    def forward(self, x: torch.Tensor) -> Any:
        x = x.requires_grad_()
        out = self.head(self.features(x)).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()


class Strange(Stack):
    """No elements, no dimensions, transposed memory, one element, and double precision."""

    def __init__(self) -> None:
        super().__init__(_blocks())
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.lone = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.list = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        out = self.features(x * self.list[0] + self.list[1]) @ self.turned.t() * self.gain
        return (out.double() * self.lone).square().mean().float() + self.empty.sum()


class Experts(Stack):
    """Each sample goes to one of four experts; one gets no sample at all."""

    def __init__(self) -> None:
        super().__init__(_blocks(2))
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = super().features(x)
        weights = self.router(x).softmax(1)
        chosen = weights.argmax(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(1)
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * weights[mine, index : index + 1])
        return x + out


class Hooked(Stack):
    """A hook of the script's own changes a gradient on its way."""

    def __init__(self) -> None:
        super().__init__(_blocks())
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)


Call = Callable[[Any, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and how its loss is computed from a part of the batch in a step; whether DDP can train it."""

    build: Callable[[], nn.Module]
    call: Call = lambda model, x, step: model(x)
    under_ddp: bool = True


def _loss_of_two_passes(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """Two forward passes before the one backward pass."""
    loss: torch.Tensor = model(x) + model(x.flip(0) * 2)
    return loss


def _input_with_gradient(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """The input needs a gradient, too: something in front of the model is being trained."""
    offset = torch.ones(WIDTH, requires_grad=True)
    loss: torch.Tensor = model(x * offset)
    return loss


CASES = {
    "shared blocks": Case(build=SharedBlocks),
    "blocks called twice": Case(build=lambda: CalledTwice(_blocks())),
    "branches": Case(build=Branching, call=lambda model, x, step: model(x, skips=step % 2 == 1), under_ddp=False),
    "batch normalisation": Case(build=Normalised),
    "named tuple of objects": Case(build=Structured, call=lambda model, x, step: model(x).loss),
    "recurrent": Case(build=Recurrent),
    "torch transformer": Case(build=Attending),
    "adapters": Case(build=Adapted),
    "gradient penalty": Case(build=Penalised, under_ddp=False),
    "strange shapes": Case(build=Strange, under_ddp=False),
    "experts": Case(build=Experts, under_ddp=False),
    "gradient hooks": Case(build=Hooked),
    "two passes": Case(build=lambda: Stack(_blocks()), call=_loss_of_two_passes, under_ddp=False),
    "input with a gradient": Case(build=lambda: Stack(_blocks()), call=_input_with_gradient),
    "no blocks": Case(build=lambda: Stack(nn.ModuleList()), call=lambda model, x, step: model(x)),
    "functional weight": Case(
        build=lambda: Stack(_blocks()),
        call=lambda model, x, step: functional.softplus(model(functional.layer_norm(x, (WIDTH,)))),
    ),
}


def _hugging_face(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A tiny transformers model with its head for text, without dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, vocab_size=50, **sizes)
        auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
        model: nn.Module = auto.from_config(config)
        return model

    return build


def _text(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    ids = (x * 10).long() % 50
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TRANSFORMERS = {
    "gpt2, tied ends": _hugging_face(
        "gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "t5, encoder and decoder": _hugging_face(
        "t5", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    ),
    "mixtral, experts": _hugging_face("mixtral", **_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "llama, rotary buffers": _hugging_face("llama", **_LLAMA),
}
if find_spec("transformers") is not None:
    CASES.update({name: Case(build=build, call=_text) for name, build in TRANSFORMERS.items()})
