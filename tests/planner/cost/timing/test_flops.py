"""Operation counts against hand-computed cases and exact parameter counts."""

from __future__ import annotations

import pytest

from planner.cost.timing.flops import (
    Geometry,
    attention_flops,
    executed_attention_flops,
    executed_layers,
    geometry,
    job_stacks,
    model_flops,
)
from planner.cost.timing.stacks import stacks
from planner.models.catalogue import find_model, models
from planner.models.counting.count import active_parameters, count_parameters
from planner.models.facts import ModelFacts
from tests.planner.cost.timing.cases import FIRST_OF_TYPE, cluster, make_job

SHAPE = Geometry(samples=2, sequence=1024, source=1024)


def test_gpt2_by_hand() -> None:
    # 12 blocks of 12 h^2 weights, a head of V h, attention 4 s^2 h a block; three times that with the backward.
    h, s, layers, vocabulary = 768, 1024, 12, 50257
    forward = s * (2 * layers * 12 * h * h + 2 * vocabulary * h) + layers * 4 * s * s * h
    assert model_flops(make_job("gpt2", sequence_length=s)) == pytest.approx(3 * forward)


def test_model_flops_are_six_per_parameter_and_token_where_attention_is_small() -> None:
    job = make_job("facebook/opt-6.7b", sequence_length=128, micro_batch_size=4)
    embeddings = job.counts.embedding - job.facts.vocab_size * job.facts.hidden_size
    assert model_flops(job) == pytest.approx(6 * (job.counts.total - embeddings) * 4 * 128, rel=0.02)


def test_model_flops_do_not_depend_on_the_plan() -> None:
    plain = make_job("facebook/opt-1.3b", micro_batch_size=2)
    for changes in ({"activation_checkpointing": "full"}, {"strategy": "fsdp"}, {"tp": 2}, {"attention": "eager"}):
        assert model_flops(make_job("facebook/opt-1.3b", micro_batch_size=2, **changes)) == model_flops(plain)


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
@pytest.mark.sweep(suite=lambda facts: FIRST_OF_TYPE[facts.model_type] is facts)
def test_weights_of_the_stacks_are_those_of_the_parameter_count(facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    stored = sum(stack.layers * stack.matmuls.stored for stack in stacks(facts))
    repeated = facts.num_layers if facts.shared_layers else 1
    assert stored == pytest.approx(counts.in_blocks * repeated, rel=0.03)


def test_a_token_passes_the_routed_experts_only() -> None:
    mixtral = find_model("mixtral-8x7b")
    active = sum(stack.layers * stack.matmuls.active for stack in stacks(mixtral))
    counts = count_parameters(mixtral)
    assert active == pytest.approx(active_parameters(mixtral, counts) - counts.embedding - counts.head, rel=0.01)


def test_a_causal_mask_halves_what_fused_attention_computes() -> None:
    (decoder,) = stacks(find_model("gpt2"))
    (encoder,) = stacks(find_model("bert-base-uncased"))
    assert executed_attention_flops(decoder, SHAPE) == attention_flops(decoder, SHAPE) / 2
    assert executed_attention_flops(encoder, SHAPE) == attention_flops(encoder, SHAPE) == 4 * 2 * 1024**2 * 768


def test_cross_attention_reads_the_source() -> None:
    short, long = Geometry(samples=1, sequence=64, source=64), Geometry(samples=1, sequence=64, source=512)
    encoder, crossing, decoder = stacks(find_model("t5-small"))
    assert encoder.length(64, 512) == crossing.length(64, 512) == 512
    width = decoder.attention_width
    assert attention_flops(decoder, long) - attention_flops(decoder, short) == 4 * 64 * (512 - 64) * width


def test_a_sliding_window_bounds_the_keys() -> None:
    (mistral,) = stacks(find_model("mistral-7b"))
    assert mistral.context(2048) == 2048
    assert mistral.context(32768) == 2 * mistral.window


def test_layers_are_those_executed() -> None:
    assert executed_layers(make_job("albert/albert-base-v2")) == 12
    assert executed_layers(make_job("t5-small")) == 12
    clip = make_job("openai/clip-vit-base-patch32")
    assert executed_layers(clip) == 24
    assert clip.facts.vision is not None
    patches, images, _ = job_stacks(clip)
    assert images.length(77, 77) == patches.length(77, 77) + 1 == (224 // 32) ** 2 + 1


def test_source_length_defaults_to_the_models_own() -> None:
    whisper = make_job("openai/whisper-tiny", cluster(1))
    assert geometry(whisper).source == 1500
