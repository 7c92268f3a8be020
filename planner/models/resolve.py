"""`--model` and `--model-size`: from what people write to ModelFacts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hardware_db.records import dataclass
from hardware_db.units import parse_count
from planner.errors import BrokenFile, ContradictoryRequest, DsplanError
from planner.models.catalogue import find_model, knows_model
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts

WAYS = "a name (`dsplan models` lists them), a config.json, package.module:factory, or --model-size 6.7B"
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def resolve_model(name: str | None, *, model_size: str | None = None) -> ModelFacts:
    """Return the model that `name` or `model_size` stands for.

    A path of a config.json or of a directory that holds one comes first, then the catalogue, then a size such as
    `6.7B`. `package.module:factory` is code: `any_model` beside the tracer runs it.

    Raises:
        ContradictoryRequest: both or neither are given.
        DsplanError: nothing answers to the name (the message offers the nearest), or the file or factory is broken.
    """
    if name is not None and model_size is not None:
        raise ContradictoryRequest(f"--model {name} and --model-size {model_size} are both given; drop one")
    if model_size is not None:
        return model_of_size(model_size)
    if name is None or not name.strip():
        raise DsplanError(f"no model is named; give --model {WAYS}")
    return _named(name.strip())


def config_file(name: str) -> Path | None:
    """Return the config.json that a name stands for, or None if it stands for something else."""
    path = Path(os.path.expanduser(name.strip()))
    if not _is_config(path):
        return None
    return path if path.suffix == ".json" else path / "config.json"


def is_factory(name: str) -> bool:
    """Return whether a name stands for `package.module:factory`."""
    return config_file(name) is None and _FACTORY.fullmatch(name.strip()) is not None


def named_model(name: str) -> ModelFacts:
    """Return the model of the catalogue with this name, else of this size; no file is looked at.

    Raises:
        DsplanError: nothing answers to the name.
    """
    return model_of_size(name) if looks_like_a_size(name) and not knows_model(name) else find_model(name)


def _named(name: str) -> ModelFacts:
    path = Path(os.path.expanduser(name))
    if _is_config(path) or (_exists(path) and not knows_model(name)) or path.suffix == ".json":
        return _from_file(path)
    if _FACTORY.fullmatch(name):
        raise DsplanError(f"{name} is code, which only dsplan itself runs; ask `import dsplan`, or name a config.json")
    return named_model(name)


def _is_config(path: Path) -> bool:
    try:
        return path.is_file() if path.suffix == ".json" else (path / "config.json").is_file()
    except OSError:  # a name too long for the file system, or a directory that may not be looked into
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _from_file(path: Path) -> ModelFacts:
    from planner.models.from_hf.config import read_config

    if not _exists(path):
        raise BrokenFile(path, "does not exist", "name the config.json of a model, or a directory that holds one")
    if path.is_file() and path.suffix != ".json":
        raise BrokenFile(path, "this is no config.json", f"--model takes {WAYS}")
    return read_config(path)


# A model known only by its size: a LLaMA-like decoder with very nearly that many parameters.


TOLERANCE = 0.005
SMALLEST, LARGEST = 10**6, 10**13
_HEADS = ((5 * 10**9, 8), (10**9, 4), (0, 1))
"""From this size on, the number of heads is a multiple of this, so that tensor parallelism divides it."""
BILLION = 10**9
"""Below it models tie the head to the embedding and use narrower heads (GPT-2, OPT-125m to 1.3B, Qwen2.5-0.5B)."""
MLP_RATIO = 8 / 3
"""Width of a gated MLP over the hidden size that costs as much as a plain one of 4 (Shazeer 2020, arXiv 2002.05202)."""


def looks_like_a_size(text: str) -> bool:
    """Return whether `text` is a number with a suffix such as `6.7B` or `350m`, or a plain count."""
    return re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*[kKmMbBtT]?\s*", text) is not None


def model_of_size(size: str) -> ModelFacts:
    """Return a decoder like LLaMA (RMSNorm, gated MLP, rotary positions, multi-head attention) of `size` parameters.

    Width over depth is near LLaMA-7B's 128, below 1B near OPT-125m's 64; the MLP is about 8/3 as wide as the model.
    The vocabulary is LLaMA's 32,000, smaller below 50M. The total is within 0.5 % of what was asked, and `parameters`
    is that of the decoder, not the number asked for.

    Raises:
        DsplanError: `size` is no count, or is below 1M or above 10T.
    """
    parameters = parse_count(size)
    if not SMALLEST <= parameters <= LARGEST:
        raise DsplanError(f"size {size} is out of range; write one between 1M and 10T")
    shape = min(_shapes(parameters), key=_oddness)
    facts = _decoder(shape, size.strip())
    total = count_parameters(facts).total
    return replace(facts, parameters=total, active_parameters=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A decoder's widths and depth, and the ratio of width to depth that is usual at its size."""

    hidden: int
    layers: int
    mlp_width: int
    vocabulary: int
    head_dim: int
    tied: bool
    usual_aspect: int


def _oddness(shape: _Shape) -> float:
    """Return how far a shape is from the usual, in logarithms of its two ratios; 4 stages should divide its depth."""
    uneven = 0.1 if shape.layers % 4 else 0.0
    aspect = abs(math.log(shape.hidden / shape.layers / shape.usual_aspect))
    return uneven + aspect + 2 * abs(math.log(shape.mlp_width / shape.hidden / MLP_RATIO))


def _shapes(parameters: int) -> Iterator[_Shape]:
    """Yield decoders within the tolerance, around the width at which depth and width are in the usual proportion."""
    large = parameters >= BILLION
    aspect, head_dim = (128, 128) if large else (64, 64 if parameters >= 50 * 10**6 else 16)
    step = head_dim * next(heads for least, heads in _HEADS if parameters >= least)
    vocabulary, tables = _vocabulary(parameters), 2 if large else 1
    # parameters = 12 hidden^2 layers and layers = hidden / aspect, embeddings left out
    centre = (parameters * aspect / 12) ** (1 / 3)
    for hidden in range(max(int(centre / 2) // step, 1) * step, int(centre * 1.5) + 2 * step, step):
        in_layers = parameters - (tables * vocabulary + 1) * hidden
        for layers in _depths(in_layers, hidden):
            width = (in_layers / layers - 4 * hidden**2 - 2 * hidden) / (3 * hidden)
            rounded = _round(width, 64 if hidden >= 512 else 8)
            missed = abs(rounded - width) * 3 * hidden * layers
            if missed <= TOLERANCE * parameters:
                yield _Shape(
                    hidden=hidden,
                    layers=layers,
                    mlp_width=rounded,
                    vocabulary=vocabulary,
                    head_dim=head_dim,
                    tied=not large,
                    usual_aspect=aspect,
                )


def _depths(in_layers: int, hidden: int) -> range:
    """Numbers of layers that leave the MLP between 2 and 4 times as wide as the model."""
    fewest, most = in_layers / (16 * hidden**2 + 2 * hidden), in_layers / (10 * hidden**2 + 2 * hidden)
    return range(max(math.ceil(fewest), 1), math.floor(most) + 1)


def _decoder(shape: _Shape, size: str) -> ModelFacts:
    heads = shape.hidden // shape.head_dim
    return ModelFacts(
        name=f"generic-{size.upper()}",
        family="generic",
        model_type="llama",
        architecture="LlamaForCausalLM",
        kind="decoder",
        parameters=0,
        active_parameters=0,
        block_class="LlamaDecoderLayer",
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp_width,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tied,
        gated_mlp=True,
        activation="silu",
        norm="rmsnorm",
        norm_bias=False,
        position_type="rope",
        dtype="bfloat16",
        note=f"synthesised: a decoder like LLaMA of nearly {size} parameters",
    )


def _vocabulary(parameters: int) -> int:
    """32,000 as LLaMA's; small models get one that leaves most of their parameters to the layers."""
    if parameters >= 50 * 10**6:
        return 32_000
    return 8_000 if parameters >= 8 * 10**6 else 1_000


def _round(width: float, multiple: int) -> int:
    return max(round(width / multiple), 1) * multiple
