"""Work over several streams is in order, and every wait that this takes is missed when it is left out."""

from __future__ import annotations

import pytest

from tests.emulated_cuda.fixtures import CardPool
from tests.strategies.cuda import stream_bodies

_OFFLOAD = "strategies.backends.zero.offload"
_PARKING = "strategies.tracing.step.checkpointing"
_DDP = "strategies.backends.ddp"


@pytest.mark.parametrize(
    ("story", "module"),
    [("down", _OFFLOAD), ("up", _OFFLOAD), ("beside", _OFFLOAD), ("parked", _PARKING), ("compressed", _DDP)],
)
def test_work_over_streams_is_in_order(card: CardPool, story: str, module: str) -> None:
    assert card.run(stream_bodies.outcome, story, module, "") == [("", True)]


@pytest.mark.parametrize(
    ("story", "module", "statement"),
    [
        ("down", _OFFLOAD, "stream.wait_stream(torch.cuda.current_stream"),
        ("down", _OFFLOAD, "(source if source.is_cuda else target).record_stream"),
        ("down", _OFFLOAD, "self._event.synchronize()"),
        ("up", _OFFLOAD, "stream.wait_stream(torch.cuda.current_stream"),
        ("up", _OFFLOAD, "torch.cuda.current_stream().wait_event"),
        ("beside", _OFFLOAD, "self._up.wait_stream(torch.cuda.current_stream"),
        ("beside", _OFFLOAD, "arrival.event.record(self._up)"),
        ("beside", _OFFLOAD, "torch.cuda.current_stream().wait_event"),
        ("parked", _PARKING, "stream.wait_stream(torch.cuda.current_stream(tensor.device))"),
        ("parked", _PARKING, "tensor.record_stream(stream)"),
        ("parked", _PARKING, "current.wait_stream(stream)"),
        ("parked", _PARKING, "tensor.record_stream(current)"),
        ("compressed", _DDP, "self._stream.wait_stream(torch.cuda.current_stream"),
    ],
)
@pytest.mark.usefixtures("emulated")
def test_an_order_with_a_wait_left_out_is_caught(card: CardPool, story: str, module: str, statement: str) -> None:
    [(error, right)] = card.run(stream_bodies.outcome, story, module, statement)
    assert not right
    assert "has not waited for it" in error or not error
