"""`dsplan max` against every estimate around what it finds."""

from __future__ import annotations

import pytest

import dsplan
from planner.search.maximum import SEQUENCE_STEP, Maximum, MaximumOptions, largest, maxima, sizes
from tests.planner.search.questions import question

CASES = [("llama-3-8b", "H100-SXM5-80GB", 8), ("gpt2", "RTX-4090", 1), ("mixtral-8x7b", "A100-SXM4-80GB", 16)]


def fits(row: Maximum, gpu: str, gpus: int, micro_batch: int = 1, **options: object) -> bool:
    chosen = row.configuration
    plan = dsplan.estimate(
        gpus=gpus,
        gpu=gpu,
        strategy=chosen.strategy,
        checkpointing=chosen.activation_checkpointing,
        offload=chosen.offload,
        micro_batch=micro_batch,
        **options,
    )
    has_margins = plan.memory.device_needed_bytes <= plan.cluster["capacity_bytes"]
    return plan.verdict != "does_not_fit" and has_margins


@pytest.mark.parametrize(("model", "gpu", "gpus"), CASES)
@pytest.mark.sweep(every=2)
def test_what_is_found_fits_and_the_next_does_not(model: str, gpu: str, gpus: int) -> None:
    request = question(model, gpu, gpus)
    rows = maxima(request, MaximumOptions())
    assert len({(row.configuration.strategy, row.configuration.offload) for row in rows}) > 5
    length = request.workload.sequence_length
    for row in rows[::3]:
        micro = row.micro_batch_size or 0
        assert not fits(row, gpu, gpus, micro + 1, model=model)
        assert not micro or fits(row, gpu, gpus, micro, model=model)
        if row.model_size:
            following = sizes()[sizes().index(row.model_size) + 1]
            assert fits(row, gpu, gpus, model_size=row.model_size, seq_len=length)
            assert not fits(row, gpu, gpus, model_size=following, seq_len=length)
        if not row.sequence_length:
            assert not fits(row, gpu, gpus, model=model, seq_len=SEQUENCE_STEP)
        else:
            assert fits(row, gpu, gpus, model=model, seq_len=row.sequence_length)
            beyond = row.sequence_length + SEQUENCE_STEP
            assert beyond > 1024 if model == "gpt2" else not fits(row, gpu, gpus, model=model, seq_len=beyond)


@pytest.mark.parametrize("answer", [0, 1, 2, 7, 63, 64, 99, 100])
@pytest.mark.parametrize("guess", [1, 7, 64, 100, 5000])
def test_halving_finds_the_same_from_any_guess(answer: int, guess: int) -> None:
    tried: list[int] = []
    assert largest(lambda number: tried.append(number) or number <= answer, guess, 100) == answer  # type: ignore[func-returns-value]
    assert len(tried) == len(set(tried))
    assert all(1 <= number <= 100 for number in tried)
