"""Changes that another task makes to a model: its head, its counts, its logits."""

from __future__ import annotations

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.models.tasks import facts_for_task
from planner.search.estimate import price
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.vocabulary import Task
from strategies.tracing.step.build import subject_of

MODELS = (
    "bert-base",
    "distilbert",
    "deberta-v3-base",
    "modernbert-base",
    "albert-base",
    "gpt2",
    "phi-2",
    "flan-t5-base",
)


@pytest.mark.parametrize("name", MODELS)
def test_a_classifier_counts_as_transformers_builds_it(name: str) -> None:
    facts = facts_for_task(find_model(name), "seq-cls")
    built = subject_of(facts, task="seq-cls").module
    assert count_parameters(facts).total == sum(parameter.numel() for parameter in built.parameters())
    assert facts.parameters == count_parameters(facts).total


def test_the_usual_task_leaves_a_model_as_it_is() -> None:
    facts = find_model("bert-base")
    assert facts_for_task(facts, "masked-lm") is facts
    classifier = facts_for_task(facts, "seq-cls")
    assert facts_for_task(classifier, "seq-cls") is classifier


@pytest.mark.parametrize("name", ["bert-base", "llama-3.2-1b"])
def test_a_classifier_has_no_logits_of_words(name: str) -> None:
    tasks: tuple[Task | None, ...] = (None, "seq-cls")
    losses = []
    for task in tasks:
        options = WorkOptions(task=task, seq_len=512, global_batch=8, precision="bf16")
        request = make_request(find_model(name), resolve_cluster(HardwareRequest(gpu="h100", gpus=1)), options)
        memory = price(*exact(request, ExactOptions(strategy="single", micro_batch=8))).memory
        losses.append(memory.phases["loss"] - memory.phases["forward"])
    words = 8 * 512 * find_model(name).vocab_size
    assert losses[0] >= 8 * words
    assert losses[1] < 0.05 * losses[0]
