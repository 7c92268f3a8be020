"""What runs once before the blocks of models that see or hear: convolutions that make tokens of pixels or sound."""

from __future__ import annotations

from planner.models.facts import ModelFacts
from planner.timing.memo import memo_by_identity
from planner.timing.stacks import Matmuls, Stack

CHANNELS = 3
"""Of the images that the towers of CLIP and SigLIP see."""

WHISPER_KERNEL = 3
"""Width of Whisper's two convolutions over time; the second has a stride of two (`modeling_whisper.py`)."""


@memo_by_identity
def stems(facts: ModelFacts) -> tuple[Stack, ...]:
    """A convolution over patches, or two over time, each as the product that it is."""
    if facts.kind == "speech-encoder-decoder":
        hidden, frames = facts.hidden_size, facts.max_source_positions
        return (
            _convolution(facts.num_mel_bins * WHISPER_KERNEL, hidden, 2 * frames),
            _convolution(hidden * WHISPER_KERNEL, hidden, frames),
        )
    if facts.vision is not None and facts.vision.patch_size:
        return _patches(facts.vision.image_size, facts.vision.patch_size, CHANNELS, facts.vision.hidden_size)
    if facts.kind == "vision" and facts.patch_size:
        return _patches(facts.image_size, facts.patch_size, facts.num_channels, facts.hidden_size)
    return ()


def _patches(image_size: int, patch_size: int, channels: int, hidden: int) -> tuple[Stack, ...]:
    return (_convolution(channels * patch_size**2, hidden, (image_size // patch_size) ** 2),)


def _convolution(inputs: int, hidden: int, positions: int) -> Stack:
    """`positions` outputs of `hidden` channels, each from `inputs` numbers."""
    weights = inputs * hidden
    product = Matmuls(active=weights, stored=weights, unsplit_width=inputs, split_width=hidden, kernels=1)
    return Stack(layers=1, matmuls=product, norms=0, length_of="fixed", fixed_length=positions)
