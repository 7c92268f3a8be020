"""Code bases: what is written down of blocks and losses is what real modules leave in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dsplan.exact.estimate import coverage_of
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.code_bases import code_base
from planner.cost.memory.activations.blocks import CHUNKS, code_blocks, fused_rows
from planner.cost.memory.activations.dimensions import model_dimensions
from planner.cost.memory.activations.form import per_sample
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts
from planner.search.estimate import job_of
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration
from planner.vocabulary import Checkpointing, Loss
from strategies.tracing.storage_tracker import StorageTracker

SAMPLES, LENGTH = 2, 128


def _facts(*, gated: bool, layers: int = 3, vocabulary: int = 3000) -> ModelFacts:
    """A small decoder: Llama's block, or GPT's with learned positions and layer norms."""
    like = find_model("llama-3-8b" if gated else "bigcode/starcoder2-3b")
    changed: dict[str, Any] = {} if gated else {"position_type": "learned", "sliding_window": 0, "num_kv_heads": 8}
    return replace(
        like,
        **{"num_kv_heads": 4, **changed},
        hidden_size=256,
        num_layers=layers,
        num_heads=8,
        head_dim=32,
        intermediate_size=704,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def _job(facts: ModelFacts, loss: Loss = "plain", checkpointing: Checkpointing = "none") -> Job:
    options = WorkOptions(seq_len=LENGTH, global_batch=SAMPLES, precision="bf16-pure", code="torch", loss=loss)
    request = make_request(facts, resolve_cluster(HardwareRequest(gpu="H100", gpus=1)), options)
    configuration = Configuration(
        strategy="single",
        backend="torch",
        micro_batch_size=SAMPLES,
        gradient_accumulation_steps=1,
        global_batch_size=SAMPLES,
        sequence_length=LENGTH,
        precision="bf16-pure",
        optimizer="sgd",
        activation_checkpointing=checkpointing,
    )
    return job_of(replace(request, counts=count_parameters(facts)), configuration)


class _Block(nn.Module):
    """A block as people write it by hand: fused norms, fused attention, a fused or a gated activation."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        width, heads, keys = facts.hidden_size, facts.num_heads, facts.num_kv_heads
        bias = not facts.gated_mlp
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * facts.head_dim, bias=bias)
        self.k = nn.Linear(width, keys * facts.head_dim, bias=bias)
        self.v = nn.Linear(width, keys * facts.head_dim, bias=bias)
        self.out = nn.Linear(heads * facts.head_dim, width, bias=bias)
        self.up = nn.Linear(width, facts.intermediate_size, bias=bias)
        self.gate = nn.Linear(width, facts.intermediate_size, bias=False) if facts.gated_mlp else None
        self.down = nn.Linear(facts.intermediate_size, width, bias=bias)

    def _heads(self, product: nn.Linear, x: Tensor, heads: int) -> Tensor:
        return product(x).view(*x.shape[:2], heads, self.facts.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))

    def attend(self, normed: Tensor) -> Tensor:
        facts = self.facts
        q, k, v = (
            self._heads(product, normed, heads)
            for product, heads in (
                (self.q, facts.num_heads),
                (self.k, facts.num_kv_heads),
                (self.v, facts.num_kv_heads),
            )
        )
        if facts.gated_mlp:
            q, k = q * 1.0, k * 1.0  # a rotation: another tensor of the same size
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=facts.gated_mlp)
        return self.out(attended.transpose(1, 2).reshape(normed.shape))

    def feed(self, normed: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(normed)))
        return self.down(functional.silu(self.gate(normed)) * self.up(normed))


_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class _Model(nn.Module):
    def __init__(self, facts: ModelFacts, *, recomputes: Checkpointing = "none") -> None:
        super().__init__()
        self.recomputes = recomputes
        self.table = nn.Embedding(facts.vocab_size, facts.hidden_size)
        self.blocks = nn.ModuleList(_Block(facts) for _ in range(facts.num_layers))
        self.norm = nn.LayerNorm(facts.hidden_size)
        self.head = nn.Linear(facts.hidden_size, facts.vocab_size, bias=False)

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.recomputes == "none":
            return block(x)
        if self.recomputes == "full":
            return checkpoint(block, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = self._block(block, x)
        return self.norm(x)


def _plain(model: _Model, tokens: Tensor) -> None:
    logits = model.head(model.hidden(tokens))
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    del logits
    loss.backward()


def _chunked(model: _Model, tokens: Tensor) -> None:
    """A chunk's logits, its loss and its backward before the next chunk, as torchtitan's wrapper does it."""
    hidden = model.hidden(tokens)
    chunks = [part.detach().contiguous().clone().requires_grad_() for part in hidden.flatten(0, 1).chunk(CHUNKS)]
    gradient = torch.zeros(hidden.flatten(0, 1).shape, dtype=torch.float32)
    at = 0
    for chunk, labels in zip(chunks, tokens.flatten().chunk(CHUNKS), strict=True):
        functional.cross_entropy(model.head(chunk).float(), labels, reduction="sum").backward()
        assert chunk.grad is not None
        gradient[at : at + len(chunk)] = chunk.grad
        at += len(chunk)
        chunk.grad = None
    del chunks, chunk
    gradient = gradient.to(hidden.dtype).view_as(hidden)
    hidden.backward(gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    """Logits of a chunk become their gradient in place; both products' gradients are made in the forward."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = round(fused_rows(LENGTH, *weight.shape) * len(hidden))
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        losses = torch.zeros(len(hidden))
        for start in range(0, len(hidden), rows):
            part = hidden[start : start + rows]
            logits = part @ weight.t()
            logits.div_(len(hidden))  # the kernel's work, in place
            of_hidden[start : start + rows] = logits @ weight
            of_weight += torch.mm(logits.t(), part).float()
        context.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_weight = context.saved_tensors
        return of_hidden, of_weight, None


def _fused(model: _Model, tokens: Tensor) -> None:
    loss: Any = _LinearCrossEntropy.apply
    loss(model.hidden(tokens).flatten(0, 1), model.head.weight, tokens.flatten()).backward()


def _peak(facts: ModelFacts, loss: Loss, *, recomputes: Checkpointing = "none") -> int:
    torch.manual_seed(0)
    model = _Model(facts, recomputes=recomputes).to(torch.bfloat16)
    tokens = torch.randint(facts.vocab_size, (SAMPLES, LENGTH))
    with StorageTracker([*model.parameters(), tokens]) as tracker:
        LOSSES[loss](model, tokens)
        return tracker.peak_bytes


LOSSES: dict[Loss, Callable[[_Model, Tensor], None]] = {"plain": _plain, "chunked": _chunked, "fused": _fused}
SMALL, LARGE = 400, 8000
"""Vocabularies with which the blocks and the logits are the peak. A chunked loss's caller holds on to the hidden states
and their gradient a little longer here than torchtitan's does."""


def _predicted(job: Job) -> float:
    """The peak of forward and backward in whole storages, of a module that has biases beside what the facts count."""
    phases = phases_of(job)
    more = sum(weight.numel() for weight in _Model(job.facts).parameters()) - job.counts.total
    return max(phases[name].total for name in ("forward", "loss", "backward")) - library_workspace(job) + 2 * more


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gated", [True, False], ids=["llama", "gpt"])
@pytest.mark.sweep(suite={"gpt-chunked-400"})
def test_a_written_form_says_what_a_module_written_by_hand_takes(gated: bool, loss: Loss, vocabulary: int) -> None:
    facts = _facts(gated=gated, vocabulary=vocabulary)
    allowed = 0.03 if (loss, vocabulary) == ("chunked", SMALL) else 0.01
    assert _predicted(_job(facts, loss)) == pytest.approx(_peak(facts, loss), rel=allowed)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("gated", [True, False], ids=["llama", "gpt"])
@pytest.mark.sweep(suite={"gpt-selective"})
def test_a_written_form_says_what_recomputing_takes(gated: bool, kind: Checkpointing) -> None:
    facts = _facts(gated=gated, layers=6, vocabulary=SMALL)
    measured = _peak(facts, "plain", recomputes=kind)
    assert _predicted(_job(facts, checkpointing=kind)) == pytest.approx(measured, rel=0.02)


# Blocks under torch.compile: what the partitioner hands from forward to backward.


def _llama(mode: str) -> tuple[nn.Module, ModelFacts, dict[str, Any]]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    facts = _facts(gated=True)
    config = LlamaConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        attn_implementation="sdpa",
    )
    turned = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=_DTYPES[mode]), torch.arange(LENGTH)[None])
    return LlamaDecoderLayer(config, 0), facts, {"position_embeddings": turned, "attention_mask": None}


def _gpt2(mode: str) -> tuple[nn.Module, ModelFacts, dict[str, Any]]:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    facts = replace(find_model("gpt2"), hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=32)
    facts = replace(facts, intermediate_size=1024, hidden_dropout=0.1, attention_dropout=0.0)
    config = GPT2Config(n_embd=256, n_head=8, attn_pdrop=0.0, attn_implementation="sdpa")
    return GPT2Block(config, 0), facts, {}


_DTYPES = {"pure": torch.bfloat16, "autocast": torch.float32}
COMPILED = [(_llama, "pure"), (_llama, "autocast"), (_gpt2, "pure")]


@pytest.mark.slow  # torch.compile takes seconds to import and to trace
@pytest.mark.parametrize(("make", "mode"), COMPILED, ids=["llama-pure", "llama-autocast", "gpt2-pure"])
def test_a_compiled_block_keeps_what_the_partitioner_keeps(
    make: Callable[[str], tuple[nn.Module, ModelFacts, dict[str, Any]]], mode: str
) -> None:
    module, facts, arguments = make(mode)
    module = module.to(_DTYPES[mode]).train()
    x = torch.randn(SAMPLES, LENGTH, facts.hidden_size, dtype=_DTYPES[mode], requires_grad=True)
    block = code_base("transformers").traits(compiled=True).block
    assert block is not None
    form = code_blocks(facts, block, mode, "sdpa")["block"]
    fixed, grows = per_sample(form.kept, model_dimensions(facts) | {"s": LENGTH})
    assert fixed + SAMPLES * grows == pytest.approx(
        _handed_over(module, x, arguments, cast=mode == "autocast"), rel=0.01
    )


def _handed_over(module: nn.Module, x: Tensor, arguments: dict[str, Any], *, cast: bool) -> int:
    """Bytes that a compiled block's forward keeps for its backward, weights and their copies left out, its input in
    place of its output."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    kept: dict[int, int] = {}
    weights = {weight.data_ptr() for weight in module.parameters()}

    def forward(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            outputs = graph(*inputs)
            for tensor in outputs[1:]:
                if isinstance(tensor, Tensor) and _is_activation(tensor) and tensor.data_ptr() not in weights:
                    kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return outputs

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = torch.compile(module, backend=backend)(x, **arguments)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()
    return sum(kept.values())


def _is_activation(tensor: Tensor) -> bool:
    """Return whether a dimension is that of the samples, or of all positions of all samples."""
    return bool({SAMPLES, SAMPLES * LENGTH} & set(tensor.shape))


@pytest.mark.parametrize(("work", "what"), [({"code": "torch"}, "--code torch"), ({"compile": True}, "--compile")])
def test_a_trace_says_what_it_does_not_run(work: dict[str, Any], what: str) -> None:
    job = _job(_facts(gated=True))
    own = replace(job, workload=replace(job.workload, **{"code": "transformers", **work}))
    coverage = coverage_of(own)
    assert coverage.job is None
    assert coverage.remark.startswith(f"the trace does not cover {what}; the closed form is used")
