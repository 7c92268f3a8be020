"""The arithmetic of our own ZeRO, without ranks: runs, buckets, boxes, the loss scale, and what the config says."""

from __future__ import annotations

import math
import re
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.cost.zero_bucket_sizes import NATIVE_CPU_BUCKET
from strategies.backends.zero.flat_shard import Bucket, Layout, Ranks, Slot, buckets_of
from strategies.backends.zero.settings import ZeroSettings, read_settings
from strategies.backends.zero.unit_all_gather import members_of
from strategies.checkpoint.parts import PartOfTensor, boxes
from strategies.config.read import read_config
from strategies.errors import CannotRun
from strategies.modules.precision import LossScale, ScaleSettings, sum_squares
from strategies.protocols import TrainingParts
from tests.strategies.training_bodies import Recipe


@pytest.mark.parametrize(("elements", "world"), list(product((1, 2, 7, 12, 31), (1, 2, 3, 5))))
def test_runs_cover_a_bucket_without_overlap(elements: int, world: int) -> None:
    layouts = [Layout(elements=elements, ranks=Ranks(rank=rank, world_size=world)) for rank in range(world)]
    covered = [element for layout in layouts for element in range(*layout.own)]
    assert covered == list(range(elements))
    assert all(layout.own[1] - layout.own[0] <= layout.run for layout in layouts)
    assert elements <= layouts[0].padded < elements + world


def test_pieces_of_all_ranks_make_up_every_parameter() -> None:
    sizes = (5, 1, 17, 3)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    starts = [sum(sizes[:before]) for before in range(len(sizes))]
    slots = [Slot(name=str(s), parameter=p, start=s) for s, p in zip(starts, parameters, strict=True)]
    for world in (1, 2, 3, 7):
        owned: dict[str, list[int]] = {slot.name: [] for slot in slots}
        for rank in range(world):
            bucket = Bucket(slots, Ranks(rank=rank, world_size=world), torch.float32)
            for slot in slots:
                start, stop = bucket.own_range(slot)
                first = bucket.own_start(slot)
                owned[slot.name] += range(first, first + stop - start)
        assert list(owned.values()) == [list(range(size)) for size in sizes]


def test_buckets_keep_dtypes_apart_and_large_parameters_alone() -> None:
    sizes = {"a": 3, "b": 4, "c": 50, "d": 2, "e": 6, "f": 1}
    named = [(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]
    dtypes = {p: torch.float64 if name == "f" else torch.float32 for name, p in named}
    buckets = buckets_of(named, Ranks(rank=0, world_size=2), dtypes, limit=20)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["c"], ["a", "b", "d", "e"], ["f"]]


@pytest.mark.parametrize("shape", [(), (1,), (9,), (3, 4), (5, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_are_the_run_and_nothing_else(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)
    for start, stop in ((a, b) for a in range(size + 1) for b in range(a, size + 1)):
        listed = list(boxes(shape, start, stop))
        assert len(listed) <= max(1, 2 * len(shape) - 1)
        taken = [numbers[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))] for b in listed]
        assert [int(n) for part in taken for n in part.reshape(-1)] == list(range(start, stop))
        assert [box.start + start for box in listed] == [int(part.reshape(-1)[0]) for part in taken]


def test_a_part_writes_through_its_boxes() -> None:
    run = torch.zeros(7)
    part = PartOfTensor.of_run(run, (3, 4), 3)
    for value, item in enumerate(part.__create_write_items__("weight", part), start=1):
        part.__get_tensor_shard__(item.index).fill_(value)
    assert run.tolist() == [1, 2, 2, 2, 2, 3, 3]


def test_the_scale_follows_its_four_settings() -> None:
    scale = LossScale(ScaleSettings(initial=16.0, window=3, hysteresis=2, floor=4.0))
    seen = []
    for overflows in (True, True, True, True, False, False, False, True):
        (scale.count_overflow if overflows else scale.count_step)()
        seen.append(scale.value)
    assert seen == [16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    again = LossScale(ScaleSettings(initial=1.0, window=3, hysteresis=2))
    again.load_state_dict(scale.state_dict())
    again.count_overflow()
    scale.count_overflow()
    assert again.value == scale.value == 4.0


def test_a_fixed_scale_and_none() -> None:
    fixed = LossScale(ScaleSettings(initial=128.0, is_dynamic=False))
    fixed.count_overflow()
    assert fixed.value == 128.0
    assert LossScale(None).value == 1.0
    assert LossScale(None).state_dict() == {}


def settings_of(script: dict[str, object], **how: object) -> ZeroSettings:
    recipe = Recipe(strategy="zero3", backend="native", world_size=2, **how)  # type: ignore[arg-type]
    parts = TrainingParts(model=nn.Linear(1, 1), plan=recipe.plan(), script=read_config(script))
    return read_settings(parts, torch.device("cpu"))


def test_norms_of_long_runs_are_right_on_a_cpu() -> None:
    values = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    small = torch.full((3,), 2.0, dtype=torch.bfloat16)
    exact = values.double().square().sum().item() + 12
    assert abs(sum_squares([values, small, values[:0]]).item() - exact) < 1e-6 * exact
    assert sum_squares([values.view(1000, 4000).T]).dtype == torch.float64
    assert sum_squares([torch.tensor([torch.inf]), small]).item() == torch.inf
    assert sum_squares([]).item() == 0


def test_settings_come_from_the_plan_and_from_deepspeeds_keys() -> None:
    plain = settings_of({})
    assert (plain.compute, plain.master, plain.accumulate, plain.travel.dtype) == (None, None, None, None)
    assert (plain.bucket, plain.persistence_threshold) == (NATIVE_CPU_BUCKET, 160)
    cap: dict[str, object] = {"communication": {"bucket_cap_mb": 0.5}}
    assert [settings_of(cap, precision=name).bucket for name in ("fp32", "bf16")] == [2**17, 2**18]
    bf16 = settings_of({}, precision="bf16", accumulation=3)
    assert (bf16.compute, bf16.master, bf16.accumulate) == (torch.bfloat16, torch.float32, torch.float32)
    script: dict[str, object] = {
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"reduce_bucket_size": 5e6, "stage3_param_persistence_threshold": "auto"},
        "fp16": {"initial_scale_power": 3, "min_loss_scale": 2},
    }
    told = settings_of(script, precision="fp16", accumulation=3)
    assert (told.travel.dtype, told.accumulate) == (torch.float32, torch.bfloat16)
    assert (told.bucket, told.persistence_threshold) == (5_000_000, 160)
    assert told.scale is not None
    assert (told.scale.initial, told.scale.floor, told.scale.hysteresis) == (8.0, 2.0, 2)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size is 'big'"),
        ({"communication_data_type": "int4"}, "communication_data_type is 'int4'; it must be one of fp32, bf16, fp16"),
    ],
)
def test_values_of_another_kind_are_named(script: dict[str, object], words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        settings_of(script)


def test_shared_parameters_belong_to_the_root() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    model = nn.Module()
    model.blocks = nn.ModuleList([block(), block(), block()])
    model.head = nn.Linear(2, 2)
    first, second, third = model.blocks
    second[0].weight = first[0].weight
    model.head.weight = third[1].weight
    root, *blocks = members_of(model)
    assert root.is_root
    assert sorted(name for name, _ in root.named) == ["blocks.0.0.weight", "blocks.2.1.weight", "head.bias"]
    assert [len(unit.named) for unit in blocks] == [3, 3, 3]
    assert sum(p.numel() for unit in (root, *blocks) for _, p in unit.named) == sum(
        p.numel() for p in model.parameters()
    )


def test_the_page_on_zero_names_what_there_is() -> None:
    root = Path(__file__).parents[3]
    rows = [line for line in (root / "docs/explanation/zero.md").read_text().splitlines() if "`strategies/" in line]
    places = [
        (path, name)
        for line in rows
        for path, names in re.findall(r"`(strategies/[\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", line)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert len(places) > 20
    for path, name in places:
        value: object = import_module(path.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            value = getattr(value, part)
