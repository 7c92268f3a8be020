"""Writes `planner/models/recorded.json` and a memory form for each of its models, from `recorded.yaml`.

    python -m scripts.generate.recorded_models [NAME ...]

Each model is built by transformers, or by diffusers where it makes images, on the meta device, where its weights are
counted, and shortened to a few blocks that run on fake tensors at their real widths; it needs torch and these
libraries, no GPU and no weights, and about ten minutes for all. With names only those are recorded again.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from hardware_db.datasheets.compile import read_yaml
from hardware_db.datasheets.loader import name_index, normalise
from hardware_db.files import replace_text
from planner.cost.memory.activations.form import FORMS, form_to_dict, structure_of
from planner.errors import BrokenFile
from planner.models.catalogue import RECORDED
from planner.models.compile import compact_row
from planner.models.facts import ModelFacts
from scripts.generate.forms.form_trace import Variant
from scripts.generate.forms.recording import Recipe, kinds_of, meta_module, recorded_form, recorded_work
from strategies.parallel.blocks import repeated_blocks
from strategies.tracing.live import counts_from_module

SOURCE = RECORDED.with_suffix(".yaml")
_RECIPE = ("config", "short", "chunk", "loops")
_OF_IMAGES = ("image_size", "patch_size", "num_channels")
_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2"})


def recipe_of(row: dict[str, Any]) -> Recipe:
    """Return a row of the YAML file, its figures those of the config and of the module on the meta device."""
    if not row.get("source"):
        raise BrokenFile(SOURCE, f"row {row.get('id')!r} has no source", "cite where its figures come from")
    facts = ModelFacts(
        name=row["id"],
        aliases=tuple(row["aliases"]),
        recorded_as=normalise(row["id"].rpartition("/")[2]),
        note=row.get("note", ""),
        **{key: row[key] for key in _OF_IMAGES if key in row},
        **{key: row[key] for key in ("family", "model_type", "architecture", "kind")},
        **dict.fromkeys(("parameters", "active_parameters", "hidden_size", "num_layers", "intermediate_size"), 0),
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 1),
    )
    return Recipe(facts=facts, **{key: row[key] for key in _RECIPE if key in row})


def figures_of(recipe: Recipe) -> tuple[ModelFacts, dict[str, int]]:
    """Return the facts with all that the config and the module say, and how often each kind of block is there."""
    module: Any = meta_module(recipe, short=False)
    if recipe.makes_images:
        return _figures_of_denoiser(recipe, module)
    config = getattr(module.config, "text_config", module.config)
    blocks = list(repeated_blocks(module))
    counts = counts_from_module(module)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    chosen = getattr(config, "num_experts_per_tok", 0) if experts else 0
    idle = sum(block.experts * block.repeats for block in counts.blocks) * (experts - chosen) // max(experts, 1)
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", 1)
    width = config.hidden_size
    facts = replace(
        recipe.facts,
        parameters=counts.total,
        active_parameters=counts.total - idle,
        block_class=",".join(dict.fromkeys(type(block).__name__ for block in blocks)),
        hidden_size=width,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or width // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or int(config.expand * width),
        vocab_size=config.vocab_size,
        max_position_embeddings=getattr(config, "max_position_embeddings", 0),
        tie_word_embeddings=bool(module.config.tie_word_embeddings),
        num_experts=experts,
        experts_per_token=chosen,
        measured_counts=counts,
    )
    return facts, dict(Counter(kinds_of(module)))


def _figures_of_denoiser(recipe: Recipe, module: Any) -> tuple[ModelFacts, dict[str, int]]:
    config, counts = module.config, counts_from_module(module)
    heads, width = config.num_attention_heads, config.attention_head_dim
    facts = replace(
        recipe.facts,
        parameters=counts.total,
        active_parameters=counts.total,
        block_class=",".join(dict.fromkeys(type(block).__name__ for block in repeated_blocks(module))),
        hidden_size=heads * width,
        num_layers=config.num_layers + getattr(config, "num_single_layers", 0),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        intermediate_size=4 * heads * width,
        measured_counts=counts,
    )
    return facts, dict(Counter(kinds_of(module)))


def variants(facts: ModelFacts) -> Iterator[Variant]:
    """Every precision, with fused attention and without; a model without attention has only one form.

    diffusers calls torch's attention function alone.
    """
    for mode in ("fp32", "autocast", "pure"):
        if facts.kind == "diffusion":
            yield Variant(mode=mode)
            continue
        yield Variant(mode=mode, eager=True)
        if facts.model_type not in _WITHOUT_ATTENTION:
            yield Variant(mode=mode)


def recorded(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of `recorded.json` and the memory forms of one model."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    recipe = recipe_of(row)
    facts, repeats = figures_of(recipe)
    recipe = replace(recipe, facts=facts)
    facts = replace(facts, work=recorded_work(recipe, repeats))
    forms = {variant.name: form_to_dict(recorded_form(recipe, variant)) for variant in variants(facts)}
    library = "diffusers" if facts.kind == "diffusion" else "transformers"
    versions = {name: version(name) for name in ("torch", library)}
    form = {"versions": versions, "structures": [{"structure": structure_of(facts), "forms": forms}]}
    return {**compact_row(facts), "work": [asdict(work) for work in facts.work]}, form


def main(arguments: list[str]) -> int:
    """Record the models that are named, or all."""
    rows = read_yaml(SOURCE, {"models"})["models"]
    kept: dict[str, Any] = {}
    if RECORDED.exists():
        kept = {row["name"]: row for row in json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]}
    wanted = [row for row in rows if not arguments or {row["id"], *row["aliases"]} & set(arguments)]
    with ProcessPoolExecutor(max_workers=2) as workers:
        pending = {row["id"]: workers.submit(recorded, row) for row in wanted}
        for name, future in pending.items():
            kept[name], form = future.result()
            replace_text(FORMS / f"{kept[name]['recorded_as']}.json", json.dumps(form, separators=(",", ":")) + "\n")
            print(f"{name}: {kept[name]['parameters']:,} parameters", flush=True)
    kept_rows = [(row, kept[row["id"]]) for row in rows if row["id"] in kept]
    spelled = [{**row, "aliases": [*row["aliases"], row["name"].rpartition("/")[2]]} for _, row in kept_rows]
    configs = [
        {"model_type": row["model_type"], "architecture": row["architecture"], "arguments": row["config"]}
        for row, _ in kept_rows
    ]
    document = {"names": name_index(spelled, SOURCE), "rows": [row for _, row in kept_rows], "configs": configs}
    replace_text(RECORDED, json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
