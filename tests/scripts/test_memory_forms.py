"""Memory forms: derived again they are those that are shipped, and they hold for sizes that were never traced."""

from __future__ import annotations

import json

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.activations.figures import figures_of
from planner.cost.memory.activations.form import (
    FORMS,
    add,
    find_form,
    form_to_dict,
    multiply,
    per_sample,
    structure_of,
    subtract,
    value,
)
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.cost.precision import recipe_of
from planner.models.catalogue import find_model, models
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration
from planner.vocabulary import Checkpointing, Precision
from scripts.generate.forms.form_trace import Variant, form_of
from scripts.generate.forms.symbols import Undecodable, decoder_of, small
from strategies.tracing.step.step import trace_step
from strategies.tracing.to_hf import shortened

FRESH = [
    ("llama-3-8b", Variant(mode="pure")),
    ("gpt2", Variant(mode="autocast", eager=True)),
    ("mixtral-8x7b", Variant(mode="pure")),
    ("google-t5/t5-small", Variant(mode="fp32")),
    ("gemma-3-1b", Variant(mode="autocast", windows=True)),
]


@pytest.mark.parametrize(("name", "variant"), FRESH, ids=[name for name, _ in FRESH])
@pytest.mark.sweep(suite={"gpt2"})
def test_shipped_forms_are_what_a_trace_gives_today(name: str, variant: Variant) -> None:
    facts = find_model(name)
    written = json.loads((FORMS / f"{facts.model_type}.json").read_text())
    (entry,) = (entry for entry in written["structures"] if entry["structure"] == structure_of(facts))
    assert json.loads(json.dumps(form_to_dict(form_of(facts, variant)))) == entry["forms"][variant.name]


def test_every_model_of_the_catalogue_has_a_form_of_its_own_structure() -> None:
    for facts in models():
        for mode in ("fp32", "autocast", "pure"):
            form = find_form(structure_of(facts), [f"cuda {mode} eager"])
            assert form is not None
            assert form.differences == 0, facts.name


CASES: list[tuple[str, Precision, Checkpointing, int, int]] = [
    ("qwen2.5-7b", "bf16", "none", 2, 700),
    ("opt-1.3b", "bf16-pure", "full", 3, 900),
    ("google-bert/bert-base-uncased", "fp32", "selective", 5, 384),
    ("facebook/bart-base", "bf16", "full", 3, 600),
]


@pytest.mark.parametrize(("name", "precision", "checkpointing", "samples", "length"), CASES)
@pytest.mark.sweep(every=4)
def test_a_form_says_of_other_sizes_what_a_trace_of_them_says(
    name: str, precision: Precision, checkpointing: Checkpointing, samples: int, length: int
) -> None:
    job = job_of(name, precision, checkpointing, samples, length)
    traced = trace_step(job)
    for phase in ("loss", "backward"):
        predicted = phases_of(job)[phase].total - library_workspace(job)
        assert predicted == pytest.approx(traced.totals[phase], rel=0.01)


def job_of(name: str, precision: Precision, checkpointing: Checkpointing, samples: int, length: int) -> Job:
    """Three blocks of a model on one GPU."""
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=1))
    options = WorkOptions(seq_len=length, global_batch=samples, precision=precision)
    request = make_request(shortened(find_model(name), 3), cluster, options)
    configuration = Configuration(
        strategy="single",
        backend="torch",
        micro_batch_size=samples,
        gradient_accumulation_steps=1,
        global_batch_size=samples,
        sequence_length=length,
        precision=precision,
        optimizer="adamw",
        activation_checkpointing=checkpointing,
    )
    return Job(
        facts=request.facts,
        counts=request.counts,
        workload=request.workload,
        cluster=cluster,
        configuration=configuration,
    )


def test_a_block_of_llama_keeps_what_its_code_says() -> None:
    """In pure bf16 a token leaves behind, of width h: the fp32 input of two norms, their normalised bf16 copies, and
    what goes into the first products of attention and MLP, 2 x (4 + 2 + 2); the block's output takes its input's place.
    Of the heads' widths q, k, v and attention's output; of the MLP's width gate, its SiLU, up, and their product, in
    two bytes each."""
    job = job_of("llama-3-8b", "bf16-pure", "none", 1, 1)
    (block,) = figures_of(job, recipe_of(job)).blocks
    width, keys, mlp, heads = 4096, 1024, 14336, 32
    statistics = 2 * 4 + heads * 4
    expected = 16 * width + 4 * width + 4 * keys + 8 * mlp + statistics
    assert block.kept[1] == expected


def test_polynomials() -> None:
    one, two = {"b s": 2.0, "": 1.0}, {"h": 3.0}
    assert multiply(one, two) == {"b h s": 6.0, "h": 3.0}
    assert subtract(add((one, two)), one) == two
    sizes = {"b": 2.0, "s": 5.0, "h": 7.0}
    assert value(multiply(one, two), sizes) == (2 * 2 * 5 + 1) * 3 * 7
    assert per_sample(multiply(one, two), sizes) == (21.0, 210.0)


def test_a_shape_that_no_symbol_explains_is_named() -> None:
    facts = small(find_model("llama-3-8b"), 3)
    decoder = decoder_of(facts, {"b": 6, "s": 211})
    assert decoder.elements((6, 211, facts.hidden_size)) == {"b h s": 1.0}
    with pytest.raises(Undecodable, match="dimension 9973"):
        decoder.elements((6, 9973))


def test_an_unknown_structure_takes_the_nearest_form() -> None:
    structure = structure_of(find_model("llama-3-8b")) | {"qk_norm": "per_head"}
    form = find_form(structure, ["cuda pure sdpa"])
    assert form is not None
    assert form.differences == 1
    assert find_form(structure | {"model_type": "never-seen"}, ["cuda pure sdpa"]) is not None
