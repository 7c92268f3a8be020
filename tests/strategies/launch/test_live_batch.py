"""The global batch of a script that does not call dsplan, in a run that goes on with other ranks."""

from __future__ import annotations

import pytest
from torch import nn

from strategies.launch.hooks import live
from strategies.run_directory.resume_state import ResumeState


@pytest.mark.parametrize(
    ("kept", "accumulates", "expected"), [(None, True, 12), (24, True, 24), (None, False, 12), (24, False, 12)]
)
def test_the_batch_is_kept_where_the_script_can_accumulate(
    kept: int | None,
    accumulates: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(live, "current", lambda: ResumeState(ranks=3, is_resumed=True, global_batch_size=kept))
    job = live.LiveJob(
        module=nn.Linear(1, 1),
        kind="accelerate",
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        data=live.ShownData(tokens=8),
        precision="fp32",
        optimizer="adamw",
        accumulates=accumulates,
    )
    assert live._global_batch(job, 3) == expected
    said = capsys.readouterr().out
    assert ("does not accumulate gradients: 3 ranks train on 12 samples a step, not on 24" in said) is (
        kept == 24 and not accumulates
    )
