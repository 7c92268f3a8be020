"""Vision-language models whose image towers read values of their batch, traced against what they use when they run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForImageTextToText

from strategies.tracing.step.images import follow_images, images_of
from strategies.tracing.step.step import loss_of
from strategies.tracing.storage_tracker import StorageTracker

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "num_heads": 4,
        "fullatt_block_indexes": [1],
    },
}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.sweep(every=2)
def test_a_model_that_reads_the_grid_of_its_patches_is_traced_as_it_runs(model_type: str) -> None:
    """Windows and images are cut by values, which fake tensors do not have."""
    config = AutoConfig.for_model(
        model_type, text_config=TEXT, vision_config=VISION[model_type], use_cache=False, image_token_id=3
    )
    config.vision_config.image_size = 168  # a window and a half
    peaks = []
    for fake in (False, True):
        module = AutoModelForImageTextToText.from_config(config).train()
        with contextlib.ExitStack() as stack:
            if fake:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                module.to_empty(device="cpu")
                stack.enter_context(follow_images(module))
            batch = images_of(config, 2, 64)
            tokens = torch.full((2, 64), 7)
            tokens[:, :36] = config.image_token_id
            given = [*module.parameters(), *module.buffers(), tokens, *batch.values()]
            with StorageTracker(given, fake=fake) as tracker:
                loss_of(module(input_ids=tokens, labels=tokens, **batch)).backward()
            peaks.append(tracker.peak_bytes)
    measured, traced = peaks
    assert traced == pytest.approx(measured, rel=0.01)
