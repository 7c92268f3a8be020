"""Measures modules without tokens beside what a trace of them says, into `hardware_db/measurements/modules_cpu.csv`.

    python -m scripts.measure.modules

Each module is planned for from a batch of three samples, as `dsplan.initialize` plans for a script's own, and trained
for two steps of AdamW on a CPU at three batch sizes; the figure is the peak of live tensor bytes in the second. Needs
torchvision, timm, transformers and diffusers. Those with tokens are measured by `scripts.measure.compositions`.
"""

from __future__ import annotations

import csv
import gc
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hardware_db.files import replace_text
from hardware_db.probe import probe
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.plan_io import plan_from_dict
from scripts.measure.machines import columns_of, measured_cluster
from scripts.measure.measured_run import Made, Subject
from strategies.tracing.example import arguments_of
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import traced_request, work_of
from strategies.tracing.step.step import loss_of
from strategies.tracing.storage_tracker import StorageTracker

TARGET = Path(__file__).parents[2] / "hardware_db" / "measurements" / "modules_cpu.csv"
SAMPLES = (2, 8, 32)
SHOWN = 3
"""Samples of the batch that the plan is made from."""

Make = Callable[[Any], nn.Module]
BatchOf = Callable[[int], Any]

# The modules, by the package whose code they are.


def _wav2vec2(transformers: Any) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=32,
        classifier_proj_size=64,
        layerdrop=0.0,
        apply_spec_augment=False,
    )
    model: nn.Module = transformers.Wav2Vec2ForSequenceClassification(config)
    return model


def _whisper_encoder(transformers: Any) -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=128, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=512, max_source_positions=400
    )
    model: nn.Module = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    return model


def _tabular(torch_itself: Any) -> nn.Module:
    layers = torch_itself.nn
    return nn.Sequential(
        layers.Linear(64, 512),
        layers.ReLU(),
        layers.BatchNorm1d(512),
        layers.Linear(512, 512),
        layers.ReLU(),
        layers.Dropout(0.1),
        layers.Linear(512, 1),
    )


def _unet(diffusers: Any) -> nn.Module:
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model


def _noised(samples: int) -> dict[str, torch.Tensor]:
    steps = torch.zeros(samples, dtype=torch.long)
    return {
        "sample": torch.randn(samples, 4, 32, 32),
        "timestep": steps,
        "encoder_hidden_states": torch.randn(samples, 77, 64),
    }


def _heard(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, 16000), "labels": torch.zeros(samples, dtype=torch.long)}


def _images(side: int) -> BatchOf:
    return lambda samples: torch.randn(samples, 3, side, side)


MODULES: Mapping[str, tuple[str, Make, BatchOf]] = {
    "ResNet-18, 64 x 64": ("torchvision", lambda package: package.models.resnet18(num_classes=10), _images(64)),
    "ResNet-50, 128 x 128": ("torchvision", lambda package: package.models.resnet50(), _images(128)),
    "ViT-tiny, 224 x 224": ("timm", lambda package: package.create_model("vit_tiny_patch16_224"), _images(224)),
    "ConvNeXt-atto, 128 x 128": ("timm", lambda package: package.create_model("convnext_atto"), _images(128)),
    "Wav2Vec2, a second of sound": ("transformers", _wav2vec2, _heard),
    "Whisper's encoder, 8 seconds": ("transformers", _whisper_encoder, lambda samples: torch.randn(samples, 80, 800)),
    "tabular MLP": ("torch", _tabular, lambda samples: torch.randn(samples, 64)),
    "UNet2DConditionModel, 32 x 32": ("diffusers", _unet, _noised),
}


# Modules with tokens, as people write them; token ids in, the mean cross-entropy of the next token out.


class GroupedBlock(nn.Module):
    """RMSNorm, attention of grouped keys with rotations, and a gated MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs of the inputs' shape."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _rotated(q), _rotated(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        output: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return output


def _rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[2], device=x.device)[:, None] / 10000 ** torch.linspace(0, 1, x.shape[3] // 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class GroupedGpt(nn.Module):
    """A stack of them between a table and a head."""

    def __init__(self, *, layers: int, width: int, heads: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([GroupedBlock(width, heads, inner) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next token."""
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def language_module(config: Mapping[str, Any]) -> nn.Module:
    """Return a `GroupedGpt` (`own` is "grouped") or the model of scripts/examples/train_gpt.py ("example").

    It has these sizes, and is the same on every rank.
    """
    sizes = dict(config)
    torch.manual_seed(0)
    if sizes.pop("own") == "grouped":
        return GroupedGpt(**sizes)
    folder = str(Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    example: nn.Module = import_module("train_gpt").Gpt(**sizes)
    return example


def language_subject(subject: Subject, device: torch.device) -> Made:
    """Return the module of a subject, with a micro-batch of its plan."""
    chosen = plan_from_dict(subject.plan).configuration
    return language_module(subject.config).to(device), token_batch(chosen.micro_batch_size, chosen.sequence_length)


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Bytes as token ids, labels beside them."""
    words = torch.randint(256, (samples, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words, "labels": words.clone()}


def main() -> None:
    """Measure the modules and write their rows."""
    text = io.StringIO()
    columns = ("module", "package", "torch", "cpu", "cores", "samples", "predicted_bytes", "measured_bytes")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows():
        writer.writerow(row)
        print(
            f"{row['module']}, {row['samples']}: {row['predicted_bytes'] / row['measured_bytes'] - 1:+.2%}", flush=True
        )
    replace_text(TARGET, text.getvalue())


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each module and batch."""
    for name, (package, make, batch_of) in MODULES.items():
        module = make(import_module(package)).train()
        for samples in SAMPLES:
            yield {
                "module": name,
                "package": f"{package} {version(package)}",
                "torch": torch.__version__,
                **columns_of(probe()),
                "samples": samples,
                "predicted_bytes": predicted(module, batch_of(SHOWN), samples),
                "measured_bytes": measured(module, batch_of(samples)),
            }


def predicted(module: nn.Module, shown: Any, samples: int) -> int:
    """Bytes allocated at the peak, as planned from a batch of other samples."""
    facts = facts_from_module(module)
    task, length = work_of(facts, module, shown)
    work = WorkOptions(task=task, seq_len=length, global_batch=samples, precision="fp32")
    request = traced_request(make_request(facts, measured_cluster("cpu", ranks=1), work), module, shown)
    plan = estimate(*exact(request, ExactOptions(strategy="single", micro_batch=samples)))
    return plan.memory.peak_allocated_bytes


def measured(module: nn.Module, batch: Any) -> int:
    """Live bytes at the peak of the second step."""
    positional, named = arguments_of(batch)
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        loss_of(module(*positional, **named)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values()]
    inputs = [value for value in (*positional, *named.values()) if isinstance(value, torch.Tensor)]
    with StorageTracker([*module.parameters(), *module.buffers(), *states, *inputs]) as tracker:
        step()
        tracker.restart_peak()
        step()
        return tracker.peak_bytes


if __name__ == "__main__":
    main()
