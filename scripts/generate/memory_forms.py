"""Writes `planner/cost/memory/activations/forms/`: what architectures keep alive in a training step.

    python -m scripts.generate.memory_forms [--frozen] [MODEL_TYPE ...]

With `--frozen` those of frozen weights, which adapters are trained beside, in files of their own. One small model per
structure is run on fake tensors in every precision and with every kind of attention; it needs torch and transformers,
no GPU and no weights, and about ten minutes on two cores for all.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from hardware_db.files import replace_text
from planner.cost.memory.activations.form import FORMS, FROZEN_ENDING, form_to_dict, structure_of
from planner.models.catalogue import models
from planner.models.facts import ModelFacts
from scripts.generate.forms.form_trace import Variant, form_of

ON_CPU = frozenset(
    {
        *("bart", "bert", "cohere", "deepseek_v3", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt"),
        *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "t5", "vit", "whisper"),
    }
)
"""Types with forms of their own on a CPU, where attention and autocast keep other tensors; the rest share the GPU's."""
FROZEN = "--frozen"
OWN_WINDOWS = frozenset({"gpt_neo"})
"""Local attention by masks of their own, which no config can be asked for."""
STAND_INS = {"deepseek": ("glm4_moe", "Glm4MoeForCausalLM")}
"""The class of the first has never been part of transformers; the second has the same kinds of layers."""


def structures(wanted: set[str]) -> dict[str, list[ModelFacts]]:
    """One model of every structure, by model type."""
    by_structure: dict[str, dict[str, ModelFacts]] = defaultdict(dict)
    for row in models():
        for facts in with_dropouts(row) if not wanted or row.model_type in wanted else ():
            by_structure[facts.model_type].setdefault(json.dumps(structure_of(facts)), facts)
    return {name: list(by_structure[name].values()) for name in sorted(by_structure)}


def with_dropouts(facts: ModelFacts) -> Iterator[ModelFacts]:
    """Yield the model as published, and without dropout in attention or anywhere, as many configs have it."""
    yield facts
    yield replace(facts, attention_dropout=0.0)
    yield replace(facts, attention_dropout=0.0, hidden_dropout=0.0)


def variants(facts: ModelFacts) -> Iterator[Variant]:
    """Yield what a plan can ask of a model."""
    for mode in ("fp32", "autocast", "pure"):
        yield Variant(mode=mode, eager=True)
        if facts.model_type in ON_CPU:
            yield Variant(mode=mode, on_cpu=True)
            yield Variant(mode=mode, eager=True, on_cpu=True)
        if not facts.eager_only or facts.fused_by_flash:
            yield Variant(mode=mode)
        if facts.sliding_window and not facts.eager_only and facts.model_type not in OWN_WINDOWS:
            yield Variant(mode=mode, windows=True)


def frozen_variants(facts: ModelFacts) -> Iterator[Variant]:
    """Yield the same for weights that are frozen, and for autocast over those that were loaded in 16 bits."""
    for variant in variants(facts):
        yield replace(variant, frozen=True)
        if variant.mode == "autocast":
            yield replace(variant, frozen=True, mode="mixed")


def entry(facts: ModelFacts, wanted: Callable[[ModelFacts], Iterator[Variant]]) -> tuple[dict[str, Any], list[str]]:
    """Return a structure with its forms, and what could not be traced."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    traced = facts
    if facts.model_type in STAND_INS:
        model_type, architecture = STAND_INS[facts.model_type]
        traced = replace(facts, model_type=model_type, architecture=architecture)
    forms, problems = {}, []
    for variant in wanted(facts):
        try:
            forms[variant.name] = form_to_dict(form_of(traced, variant))
        except Exception as problem:  # one line each; whoever runs this decides what to do about them
            problems.append(f"{facts.name}, {variant.name}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
    for name in [name for name, form in forms.items() if form == forms.get(name.replace(" mixed ", " pure "), form)]:
        if " mixed " in name:
            del forms[name]  # the same without autocast, which is looked up in its place
    return {"structure": structure_of(facts), "forms": forms}, problems


def main(arguments: list[str]) -> int:
    """Write the forms of the model types that are named, or of all."""
    FORMS.mkdir(exist_ok=True)
    frozen = FROZEN in arguments
    chosen = structures({argument for argument in arguments if argument != FROZEN})
    wanted, ending = (frozen_variants, FROZEN_ENDING) if frozen else (variants, "")
    failed = 0
    with ProcessPoolExecutor(max_workers=2) as workers:
        pending = {
            model_type: [workers.submit(entry, facts, wanted) for facts in rows] for model_type, rows in chosen.items()
        }
        for model_type, futures in pending.items():
            structures_with_problems = [future.result() for future in futures]
            written = {
                "versions": {name: version(name) for name in ("torch", "transformers")},
                "structures": [structure for structure, _ in structures_with_problems],
            }
            replace_text(FORMS / f"{model_type}{ending}.json", json.dumps(written, separators=(",", ":")) + "\n")
            print(f"{model_type}: {len(futures)} structures", flush=True)
            for problem in (problem for _, problems in structures_with_problems for problem in problems):
                failed += 1
                print(f"  not traced: {problem}", file=sys.stderr, flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
