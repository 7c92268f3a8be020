"""Denoisers of diffusers, each with the loss that its training scripts take, and batches of latents for them.

A sample is an image: latents whose patches are the `length` tokens of a trace, and the embeddings of its text. What
makes these (the autoencoder, the text encoders) is frozen in training and runs before the step; it is not part of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from planner.errors import DsplanError

Batch = dict[str, Any]


class Denoiser(nn.Module):
    """A denoiser with the mean squared error of what it predicts, in fp32, over as many channels as the target has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config: Any = model.config

    def forward(self, target: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        """Return an object with `loss`."""
        predicted = self.model(**inputs, return_dict=False)[0]
        if predicted.dim() == 4:  # DiT predicts a variance as well, which this loss leaves out
            predicted = predicted[:, : target.shape[1]]
        return SimpleNamespace(loss=nn.functional.mse_loss(predicted.float(), target.float()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """One class of diffusers: pixels of the latents that a token is wide, and its inputs for samples of a side."""

    patch: int
    batch: Callable[[Any, int, int], Batch]


def denoiser(architecture: str, arguments: Mapping[str, Any], length: int) -> Denoiser:
    """Return a class of diffusers with its arguments, for latents of `length` patches; on the meta device.

    Raises:
        DsplanError: diffusers is not installed.
    """
    changed = dict(arguments)
    if architecture == "DiTTransformer2DModel":
        changed["sample_size"] = _side(length) * _FAMILIES[architecture].patch  # its table of positions has this size
    try:
        build: Any = getattr(import_module("diffusers"), architecture)
    except ImportError as missing:
        raise DsplanError(f"{architecture} is a class of diffusers; pip install diffusers") from missing
    with torch.device("meta"):
        return Denoiser(build(**changed)).train()


def batch_of(module: Denoiser, samples: int, length: int) -> Batch:
    """Return what a denoiser is given: latents of `length` patches, times, embeddings, and the target."""
    family = _FAMILIES[type(module.model).__name__]
    return family.batch(module.config, samples, _side(length) * family.patch)


def _side(length: int) -> int:
    side = math.isqrt(length)
    if side * side != length:
        raise DsplanError(f"{length} patches are no square image")
    return side


def _latents(config: Any, samples: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, config.in_channels, side, side), torch.zeros(samples, config.in_channels, side, side)


CLIP_TOKENS, T5_TOKENS = 77, 256
"""Tokens of a prompt: CLIP's, and those that Stable Diffusion 3's scripts give T5 (train_dreambooth_sd3.py,
`max_sequence_length`: 77 by default in the script, 256 in the pipeline, which is taken here)."""
FLUX_TOKENS = 512
"""Those of Flux's pipeline (`max_sequence_length`)."""


def _unet(config: Any, samples: int, side: int) -> Batch:
    latents, target = _latents(config, samples, side)
    batch: Batch = {
        "sample": latents,
        "timestep": torch.zeros(samples, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(samples, CLIP_TOKENS, config.cross_attention_dim),
        "target": target,
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {
            "text_embeds": torch.zeros(samples, pooled),
            "time_ids": torch.zeros(samples, 6),
        }
    return batch


def _dit(config: Any, samples: int, side: int) -> Batch:
    latents, target = _latents(config, samples, side)
    times, labels = torch.zeros(samples, dtype=torch.long), torch.zeros(samples, dtype=torch.long)
    return {"hidden_states": latents, "timestep": times, "class_labels": labels, "target": target}


def _sd3(config: Any, samples: int, side: int) -> Batch:
    latents, target = _latents(config, samples, side)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": torch.zeros(samples, CLIP_TOKENS + T5_TOKENS, config.joint_attention_dim),
        "pooled_projections": torch.zeros(samples, config.pooled_projection_dim),
        "timestep": torch.zeros(samples),
        "target": target,
    }


def _flux(config: Any, samples: int, side: int) -> Batch:
    tokens = side * side
    return {
        "hidden_states": torch.zeros(samples, tokens, config.in_channels),
        "encoder_hidden_states": torch.zeros(samples, FLUX_TOKENS, config.joint_attention_dim),
        "pooled_projections": torch.zeros(samples, config.pooled_projection_dim),
        "timestep": torch.zeros(samples),
        "guidance": torch.zeros(samples),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(FLUX_TOKENS, 3),
        "target": torch.zeros(samples, tokens, config.in_channels),
    }


_FAMILIES: Mapping[str, _Family] = {
    "UNet2DConditionModel": _Family(patch=1, batch=_unet),
    "DiTTransformer2DModel": _Family(patch=2, batch=_dit),
    "SD3Transformer2DModel": _Family(patch=2, batch=_sd3),
    "FluxTransformer2DModel": _Family(patch=1, batch=_flux),
}
