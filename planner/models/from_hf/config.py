"""ModelFacts from a Hugging Face config: every model_type of `architectures.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware_db.handed_in import quote, read_json
from planner.errors import BrokenFile
from planner.limits import Limit
from planner.models.counting.count import active_parameters, count_parameters
from planner.models.facts import ModelFacts
from planner.models.from_hf.quirks import QUIRKS
from planner.models.from_hf.reader import FACTORY_REMEDY, ConfigReader

# What each kind of model is built as; a config.json that names another class has weights that are not counted here.
CLASS_ENDINGS: Mapping[str, tuple[str, ...]] = {
    "decoder": ("ForCausalLM", "LMHeadModel", "ForSequenceClassification", "Model"),
    "encoder": (
        "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
        "Model",
    ),
    "encoder-decoder": ("ForConditionalGeneration", "Model"),
    "speech-encoder-decoder": ("ForConditionalGeneration", "Model"),
    "vision": ("ForImageClassification", "Model"),
    "vision-text": ("CLIPModel",),
    "vision-language": ("ForConditionalGeneration",),
}  # fmt: skip


def read_config(path: Path) -> ModelFacts:
    """Return the model of a config.json, or of a directory that holds one; named after the directory.

    Raises:
        BrokenFile: the file is missing, unreadable, not JSON, or lacks a field.
        UnknownName: its model_type is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise BrokenFile(path, "holds no config.json", "name a directory that `save_pretrained` wrote")
    config = read_json(file, "name the model's config.json, or save the config again")
    if not isinstance(config, dict):
        raise BrokenFile(file, f"holds a {type(config).__name__}, not an object", "name the model's config.json")
    facts = facts_from_config(config, str(file))
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    return replace(facts, name=str(config.get("_name_or_path") or name))


def facts_from_config(config: Mapping[str, Any], name: str) -> ModelFacts:
    """Return the model that transformers builds from `config`, parsed JSON or what `PretrainedConfig.to_dict()` gives.

    Keys that are absent mean the config class's default, as in transformers, except the sizes, which must be there.
    `name` names the model, and the file in messages.

    Raises:
        BrokenFile: a field is missing or ill-typed, or the config asks for weights that are not counted.
        UnknownName: the model_type is not known; the message offers the nearest.
    """
    reader = ConfigReader.of(config, name)
    entry = reader.architecture
    figures = reader.facts()
    figures["architecture"] = _built_class(reader)
    for quirk in QUIRKS.get(entry.model_type, ()):
        figures |= quirk(reader, figures)
    if entry.kind == "vision" and "num_channels" not in figures:
        raise reader.problem(f"{entry.model_type} is only counted as a part of another model", FACTORY_REMEDY)
    figures |= _rotary_base(reader) | _rotary_scaling(reader)
    figures = _derived(reader, figures) | {"model_type": entry.model_type, "kind": entry.kind}
    facts = ModelFacts(
        name=name,
        family=entry.model_type,
        parameters=0,
        active_parameters=0,
        block_class=entry.block_class,
        dtype=_dtype(config),
        **figures,
    )
    counts = count_parameters(facts)
    return replace(facts, parameters=counts.total, active_parameters=active_parameters(facts, counts))


def _built_class(reader: ConfigReader) -> str:
    named = reader.config.get("architectures") or [reader.architecture.architecture]
    if not isinstance(named, list | tuple) or not isinstance(named[0], str):
        raise reader.problem(f"field 'architectures' is {quote(named)}", "write a list of class names")
    endings = CLASS_ENDINGS[reader.architecture.kind]
    if not named[0].endswith(endings):
        raise reader.problem(f"architecture {named[0]!r} is none of *{', *'.join(endings)}", FACTORY_REMEDY)
    return named[0]


def _derived(reader: ConfigReader, derived: dict[str, Any]) -> dict[str, Any]:
    """Figures that follow from others where the config leaves them open, as in the config classes."""
    if "num_layers" not in derived:
        derived["num_layers"] = derived["encoder_layers"]
    derived.setdefault("intermediate_size", 4 * derived["hidden_size"])
    derived.setdefault("num_kv_heads", derived["num_heads"])
    if derived["hidden_size"] % derived["num_heads"] and "head_dim" not in derived:
        sizes = f"{derived['hidden_size']} is no multiple of its {derived['num_heads']} attention heads"
        raise reader.problem(f"hidden size {sizes}", "correct one of them")
    derived.setdefault("head_dim", derived["hidden_size"] // derived["num_heads"])
    if "num_labels" not in derived and derived["architecture"].endswith(("Classification", "ForQuestionAnswering")):
        derived["num_labels"] = _num_labels(reader)
    return derived


def _rotary_base(reader: ConfigReader) -> dict[str, int]:
    """Read the base of rotary positions, which transformers 5 moved into `rope_parameters`."""
    inside = reader.config.get("rope_parameters")
    base = reader.config.get("rope_theta") or (inside.get("rope_theta") if isinstance(inside, Mapping) else None)
    return {"rotary_base": int(base)} if isinstance(base, int | float) and base > 0 else {}


def _rotary_scaling(reader: ConfigReader) -> dict[str, str]:
    """Read how rotary positions are scaled, by transformers 4's key or 5's."""
    for key in ("rope_scaling", "rope_parameters"):
        inside = reader.config.get(key)
        kind = (inside.get("rope_type") or inside.get("type")) if isinstance(inside, Mapping) else None
        if isinstance(kind, str) and kind != "default":
            return {"rotary_scaling": kind}
    return {}


_LABELS = Limit(least=1, most=100_000_000)


def _num_labels(reader: ConfigReader) -> int:
    """Return outputs of a classifier: `num_labels`, or as many as `id2label` has, or transformers' default of 2."""
    labels = reader.config.get("id2label")
    counted = reader.config.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)
    if not _LABELS.allows(counted):
        raise reader.problem(f"field 'num_labels' is {quote(counted)}", f"write {_LABELS}")
    return int(counted)


def _dtype(config: Mapping[str, Any]) -> str:
    given = config.get("dtype") or config.get("torch_dtype") or ""
    return str(given).removeprefix("torch.")
