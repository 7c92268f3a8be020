"""dsplan's lines among a script's output: label, stream and rank, in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardware_db.notices import notice

ROOT = Path(__file__).parents[2]


def test_a_notice_is_labelled_line_by_line_on_the_stream_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    notice("a\nb")
    notice("c", stream="stdout")
    assert capsys.readouterr() == ("dsplan: c\n", "dsplan: a\ndsplan: b\n")


@pytest.mark.parametrize(("rank", "expected"), [(None, "dsplan: a\n"), ("0", "dsplan: a\n"), ("1", "")])
def test_a_notice_of_rank_zero_is_printed_there_alone(
    rank: str | None, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    notice("a", rank_zero=True)
    assert capsys.readouterr().err == expected


def test_nobody_else_writes_the_label() -> None:
    rooms = ("dsplan", "strategies", "planner", "hardware_db")
    files = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    own = [str(path.relative_to(ROOT)) for path in files if re.search(r"[^\"]\"dsplan: ", path.read_text())]
    assert own == ["hardware_db/notices.py"]
