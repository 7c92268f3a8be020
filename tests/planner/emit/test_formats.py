"""Rules that hold for every format: the table of formats, the frozen files, refusals in one line."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from planner.cost.memory.host import NO_ROOM_TO_LOAD
from planner.emit import FORMATS, EmitOptions, emit, script_duties
from planner.errors import ContradictoryRequest, UnknownName
from planner.types.plan import Plan
from tests.planner.emit.canaries import CANARIES, FROZEN, frozen_files
from tests.planner.emit.plans import catalogue_model, make_plan


def test_formats_are_these() -> None:
    assert list(FORMATS) == [
        *("deepspeed", "accelerate", "huggingface", "torchrun", "slurm", "mpi", "kubernetes", "skypilot", "dstack"),
        *("torchtitan", "megatron", "megatron-bridge", "nemo", "nanotron"),
        *("axolotl", "llama-factory", "ms-swift", "trl", "torchtune", "verl", "openrlhf", "nemo-rl"),
    ]
    for target in FORMATS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", ["slrum", "", "deepsped"])
def test_an_unknown_format_names_those_that_exist(name: str) -> None:
    with pytest.raises(UnknownName) as caught:
        emit(make_plan(), name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(f"choose one of {', '.join(FORMATS)}")


@pytest.mark.parametrize("case", CANARIES)
def test_frozen(case: str) -> None:
    """scripts/generate/refresh_frozen.py rewrites them after an intended change."""
    directory = FROZEN / case
    frozen = {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in directory.rglob("*")
        if path.is_file()
    }
    assert frozen_files(CANARIES[case]) == frozen


def test_no_frozen_case_is_left_over() -> None:
    assert {path.name for path in FROZEN.iterdir()} == set(CANARIES)


REFUSED = [
    ("deepspeed", make_plan("fsdp"), "fsdp plan (FSDP)"),
    (
        "deepspeed",
        make_plan("zero2", dp_replicate=2, dp_shard=4),
        "DeepSpeed 0.19 shards over all ranks; use backend native",
    ),
    ("deepspeed", make_plan("zero1", offload="all"), "with offload all"),
    ("deepspeed", make_plan("ddp", precision="bf16-pure"), "in bf16-pure"),
    ("deepspeed", make_plan("zero1", dp_shard=4, tp=2), "with tp 2 and pp 1"),
    ("accelerate", make_plan("fsdp", offload="optimizer"), "with offload optimizer"),
    ("accelerate", make_plan("ddp", dp_replicate=4, tp=2), "with tp 2"),
    ("accelerate", make_plan("fsdp", dp_shard=4, pp=2), "with pp 2"),
    ("accelerate", make_plan("fsdp", gpus=2, vendor="cpu"), "for CPU ranks"),
    ("accelerate", make_plan("zero3", precision="bf16-pure", offload="all"), "in bf16-pure with offload"),
    ("huggingface", make_plan("hsdp", dp_replicate=2, dp_shard=4), "hsdp plan"),
    ("huggingface", make_plan("fsdp", offload="nvme"), "with offload nvme"),
    ("huggingface", make_plan("fsdp", gpus=2, vendor="cpu"), "for CPU ranks"),
    ("huggingface", make_plan("fsdp", dp_shard=4, pp=2), "with tp 1 and pp 2"),
    ("huggingface", make_plan("fsdp", dp_shard=2, tp=2, cp=2), "with tp 2 and cp 2"),
    ("huggingface", make_plan("fsdp", optimizer="muon"), "with optimizer muon"),
    ("deepspeed", make_plan("zero1", dp_shard=4, cp=2), "with tp 1 and pp 1 and cp 2"),
    ("accelerate", make_plan("fsdp", ep=4), "with ep 4"),
    ("accelerate", make_plan("zero2", dp_shard=4, cp=2), "with cp 2"),
    ("accelerate", make_plan("fsdp", dp_shard=4, cp=2, attention="flash"), "with cp and attention flash"),
    ("accelerate", make_plan("fsdp", dp_shard=1, tp=8), "with tp 8 over all its ranks"),
    ("accelerate", make_plan("hsdp", nodes=2, dp_replicate=2, dp_shard=1, cp=4), "with dp_shard 1"),
]


@pytest.mark.parametrize(("every", "words"), [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st")])
def test_blocks_between_recomputed_ones_are_counted_in_english(every: int, words: str) -> None:
    plan = make_plan("fsdp", activation_checkpointing="full", checkpoint_every=every)
    with pytest.raises(ContradictoryRequest, match=f"with every {words} block recomputed cannot"):
        emit(plan, "axolotl")


@pytest.mark.parametrize(
    ("format", "plan", "remedy"),
    [
        (
            "torchtune",
            make_plan("zero1"),
            "plan by `dsplan estimate --out FILE` with --strategy single or fsdp or hsdp",
        ),
        ("trl", make_plan("fsdp", dp_shard=4, pp=2), "plan by `dsplan estimate --out FILE` with --pp 1"),
        ("trl", make_plan("fsdp", precision="fp16"), "plan with --precision fp32 or bf16"),
    ],
)
def test_a_remedy_names_the_command_that_takes_its_flags(format: str, plan: Plan, remedy: str) -> None:
    with pytest.raises(ContradictoryRequest) as caught:
        emit(plan, format)
    assert str(caught.value).endswith(f"; {remedy}")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_weights_in_4_bits_are_stored_in_what_is_computed_in(precision: str, dtype: str) -> None:
    """FSDP2 casts codes of another dtype, and accelerate shards none of whole numbers."""
    lora = {"method": "qlora", "lora_rank": 8, "lora_targets": "all-linear"}
    plan = make_plan("fsdp", precision=precision, workload=lora, model=catalogue_model("llama-3-8b"))
    note = f"{NO_ROOM_TO_LOAD} 8 copies of the model: every rank reads its own parts"
    plan = replace(plan, notes=("another note", note))
    duty = (
        "stores linear layers in 4 bits: quantization_config=BitsAndBytesConfig(load_in_4bit=True,"
        " bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True,"
        f" bnb_4bit_compute_dtype=torch.{dtype}, bnb_4bit_quant_storage=torch.{dtype})"
    )
    for format in ("accelerate", "torchrun", "huggingface"):
        duties = script_duties(plan, format, EmitOptions())
        assert duty in duties
        assert f"loads the model with dtype=torch.{dtype}, attn_implementation='sdpa'" in duties
        assert f"loads as counted: {note}" in duties
        assert not any("another note" in text for text in duties)
    for format, key in (("trl", "dtype"), ("ms-swift", "torch_dtype"), ("axolotl", None), ("llama-factory", None)):
        config = next(iter(emit(plan, format).values()))
        assert f"#  - loads as counted: {note}\n" in config
        if key is not None:
            assert f"\n{key}: {dtype}\n" in config
            assert f"\nbnb_4bit_quant_storage: {dtype}\n" in config


@pytest.mark.parametrize(("format", "plan", "reason"), REFUSED)
def test_what_a_format_cannot_carry_is_refused_in_one_line(format: str, plan: Plan, reason: str) -> None:
    with pytest.raises(ContradictoryRequest) as caught:
        emit(plan, format)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert "; " in message
