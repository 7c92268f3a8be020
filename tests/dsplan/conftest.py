from __future__ import annotations

import pytest

from tests.dsplan.browser import browser, open_page
from tests.dsplan.cli import Cli

__all__ = ["browser", "open_page"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
