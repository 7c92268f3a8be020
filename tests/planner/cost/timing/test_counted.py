"""Operations against those that torch counts while it runs the real classes of transformers on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from planner.cost.timing.flops import BACKWARD, model_flops
from planner.models.catalogue import models
from planner.models.facts import ModelFacts
from planner.models.tasks import default_sequence_length
from strategies.tracing.cuda.attention import unpadded
from strategies.tracing.step.build import Subject, subject_of
from tests.planner.cost.timing.cases import cluster, make_job

pytest.importorskip("transformers")

WITHOUT_A_CLASS = {"deepseek"}
"""Model types whose code is only in their repositories."""

SEES_IMAGES = {"vision-language"}
"""Where images go in the text depends on the tokens, which fake ones do not have."""

SAMPLES, LAYERS = 2, 2


def smallest_of_every_type() -> Iterator[ModelFacts]:
    smallest: dict[str, ModelFacts] = {}
    for facts in sorted(models(), key=lambda facts: facts.parameters, reverse=True):
        smallest[facts.model_type] = facts
    yield from (facts for name, facts in sorted(smallest.items()) if name not in WITHOUT_A_CLASS)


def counted(subject: Subject, length: int) -> int:
    """Operations of one forward with its loss."""
    subject.module.to(torch.bfloat16)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_product})
    with FakeTensorMode(allow_non_fake_inputs=True):
        subject.module.to_empty(device="cpu")
        subject.module.tie_weights()  # type: ignore[operator]
        batch = subject.batch_of(SAMPLES, length)
        narrow = {
            name: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        with unpadded(), counter:
            subject.module(**narrow)
    return counter.get_total_flops()


def _grouped_product(rows: torch.Size, weights: torch.Size, *_: object, **__: object) -> int:
    """Every row passes one expert; torch gives no formula of its own."""
    return 2 * rows[0] * rows[1] * weights[-1]


IN_SUITE = (
    *("albert", "baichuan", "bart", "bloom", "clip", "deberta-v2", "deepseek_v2", "deepseek_v3", "dinov2", "falcon"),
    *("gemma2", "gemma3", "gpt2", "gpt_neo", "gpt_oss", "llama", "modernbert", "mt5", "t5", "whisper"),
)
"""One of every kind, with gated and plain MLPs, experts, sliding windows, shared keys and latent attention."""


@pytest.mark.parametrize("facts", list(smallest_of_every_type()), ids=lambda facts: facts.model_type)
@pytest.mark.sweep(every=6, suite=lambda facts: facts.model_type in IN_SUITE)
def test_operations_are_those_that_torch_counts(facts: ModelFacts) -> None:
    if facts.kind in SEES_IMAGES:
        pytest.skip("its text is counted as gemma3_text, its images as vit")
    subject = subject_of(facts, attention="eager", layers=LAYERS)
    shortened = subject.facts
    length = default_sequence_length(shortened) if facts.kind.startswith("vision") else 448
    job = make_job(shortened, cluster(1), strategy="single", micro_batch_size=SAMPLES, sequence_length=length)
    assert model_flops(job) / (1 + BACKWARD) == pytest.approx(counted(subject, length), rel=0.01)
