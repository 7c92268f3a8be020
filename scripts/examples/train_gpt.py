"""A small GPT learns the text of Python's standard library; the same script under every strategy.

    dsplan run scripts/examples/train_gpt.py                        # dsplan plans, starts the ranks, and measures
    torchrun --nproc-per-node 2 scripts/examples/train_gpt.py       # dsplan plans inside the ranks that torchrun starts
    python scripts/examples/train_gpt.py                            # one process
    dsplan run --nproc 4 --strategy fsdp --ep 2 scripts/examples/train_gpt.py --experts 4   # a mixture of experts

How the model is spread (DDP, FSDP2, ZeRO-1, -2, -3), the micro-batch and the accumulation are the plan's. The script
fixes what the training is: model, text, and the global batch, so the losses are the same under every plan.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from stdlib_text import VOCABULARY, StdlibText
from torch import nn
from torch.nn import functional

import dsplan


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.num_heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        if experts:
            self.top_k = 2
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = Experts(experts, width)
        else:
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under tensor parallelism the projections give this rank's heads, and `num_heads` is how many these are.
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        changed: torch.Tensor = x + self._mlp(self.mlp_norm(x))
        return changed

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "experts"):
            dense: torch.Tensor = self.down(functional.gelu(self.up(x)))
            return dense
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        mixed: torch.Tensor = self.experts(tokens, chosen, weights)
        return mixed.view_as(x)


class Experts(nn.Module):
    """MLPs of which each token takes the two that its router chose.

    In the form of transformers' mixtures, which expert parallelism (`--ep`) spreads over ranks: weights have experts
    first, and the forward pass takes tokens [tokens, width], chosen experts and their weights, both [tokens, 2].
    """

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(tokens)
        for expert in range(self.num_experts):  # under --ep: this rank's
            rows, choice = torch.where(chosen == expert)
            gate, up = functional.linear(tokens[rows], self.gate_up_proj[expert]).chunk(2, -1)
            own = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            mixed = mixed.index_add(0, rows, (own * weights[rows, choice, None]).to(mixed.dtype))
        return mixed


class Gpt(nn.Module):
    """Bytes in, the mean cross-entropy of the next byte out, nats."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, experts: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, experts) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch", type=int, default=16, help="samples per optimizer step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes per sample")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--experts", type=int, default=0, help="of each block, in place of its MLP")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    engine, _, dataloader, _ = dsplan.initialize(
        model=Gpt(
            layers=options.layers,
            width=options.hidden,
            heads=options.heads,
            length=options.sequence_length,
            experts=options.experts,
        ),
        training_data=StdlibText(length=options.sequence_length, windows=8192),
        config={"train_batch_size": options.global_batch},
    )
    assert dataloader is not None
    engine.train()
    recent: list[torch.Tensor] = []
    batches = itertools.chain.from_iterable(itertools.repeat(dataloader))
    while engine.global_steps < options.steps:
        recent.append(engine.train_batch(batches))  # takes as many micro-batches as the plan's step has
        if engine.global_steps % 10 == 0:
            if engine.is_main:
                print(f"step {engine.global_steps} mean loss {torch.stack(recent).mean().item():.4f}", flush=True)
            recent.clear()


if __name__ == "__main__":
    main()
