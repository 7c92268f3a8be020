"""Plans as the search makes them, rather than by hand, into every format and before DeepSpeed's parser."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path

from dsplan import HardwareSelector
from planner.emit import FORMATS, emit
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from tests.planner.emit.consumers import ask

MODELS = ("facebook/opt-125m", "facebook/opt-6.7b", "facebook/opt-30b", "t5-3b", "mixtral-8x7b", "bert-large-uncased")


def recommended() -> list[Plan]:
    selector = HardwareSelector(gpu="A100-SXM4-40GB")
    return [
        selector.get_distributed_training_config(None, model, gpu_count=gpus).plan
        for model, gpus in itertools.product(MODELS, (8, 64))
    ]


def test_every_recommended_plan_has_a_config_that_a_trainer_reads(tmp_path: Path) -> None:
    question = []
    for plan in recommended():
        files: dict[str, dict[str, str]] = {}
        for format in FORMATS:
            with suppress(ContradictoryRequest):
                files[format] = emit(plan, format)
        assert {"accelerate", "torchrun"} <= set(files), plan.configuration
        if "deepspeed" in files:
            config = json.loads(files["deepspeed"]["deepspeed.json"])
            question.append([plan.configuration.dims.data_parallel, config])
    answers = ask("deepspeed_parse.py", question, directory=tmp_path)
    assert len(answers) == len(question) >= 3
    assert all(answer["unknown"] == [] for answer in answers)
