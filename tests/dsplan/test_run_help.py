"""Help of `dsplan run` names the defaults of the modules that use them."""

from __future__ import annotations

from dsplan.cli.app import load_command
from planner.question_defaults import LORA_RANK
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.launch.policy import RETRIES
from strategies.supervision.autosave_interval import CHECKPOINT_MINUTES
from strategies.supervision.hang_detection import HANG_SECONDS


def test_help_of_run_names_the_defaults_of_the_modules_that_use_them() -> None:
    texts = {parameter.name: getattr(parameter, "help", "") or "" for parameter in load_command("run").params}
    assert f"progress; {RETRIES}, or 0" in texts["retries"]
    assert f"minutes; {CHECKPOINT_MINUTES:g}, or 0" in texts["checkpoint_minutes"]
    assert f"progress; {HANG_SECONDS / 60:g}, or 0" in texts["hang_minutes"]
    assert f"SIGUSR1; {GRACE_SECONDS:g} by default" in texts["grace_seconds"]
    assert f"adapters; {LORA_RANK} by default" in texts["lora_rank"]
