"""The snippets of docs/reference/hardware-selector.md run, one after another, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsplan.selector import MODEL_FAMILIES

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "hardware-selector.md").read_text(encoding="utf-8")


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 5
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/reference/hardware-selector.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("4 x A100-SXM4-80GB\n")
    assert "does not fit on 1 x A100-SXM4-80GB" in printed


def test_the_page_names_every_key_and_family() -> None:
    from dsplan import HardwareSelector

    selector = HardwareSelector(gpu="A100-SXM4-80GB")
    for model, limit in (("facebook/opt-125m", None), ("facebook/opt-1.3b", 24), ("facebook/opt-13b", 16)):
        config = selector.get_distributed_training_config(None, model, gpu_count=8, max_memory_gb=limit)
        assert not [key for key in config if f"`{key}`" not in PAGE]
    assert not [family for family in MODEL_FAMILIES if f"`{family}`" not in PAGE]
