"""Scripts are recognised from their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from strategies.launch.recognise import recognise
from tests.strategies.launch.command import EXAMPLES

SOURCES = {
    "dsplan": "import dsplan\nengine = dsplan.initialize(model)",
    "huggingface": "from transformers import Trainer as T, TrainingArguments\nargs = TrainingArguments(output_dir='x')",
    "accelerate": "def main():\n    import accelerate\n    accelerator = accelerate.Accelerator()",
    "deepspeed": "import deepspeed\nengine, *_ = deepspeed.initialize(model=model)",
    "plain": "import torch\nprint(torch.__version__)",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_kind(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCES[kind])
    assert recognise(script).kind == kind


def test_dsplan_decides_before_the_library_that_the_script_also_uses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from dsplan import initialize\n" + SOURCES["deepspeed"] + "\ninitialize(model)")
    assert recognise(script).kind == "dsplan"


def test_an_argument_parser_of_training_arguments_is_a_trainer_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import transformers as t\nparser = t.HfArgumentParser((Mine, t.TrainingArguments))")
    assert recognise(script).kind == "huggingface"


def test_importing_transformers_alone_makes_no_trainer_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from transformers import GPT2Config\nGPT2Config()")
    assert recognise(script).kind == "plain"


def test_whether_accelerate_accumulates(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCES["accelerate"])
    assert not recognise(script).accumulates
    assert recognise(EXAMPLES / "accelerate_loop.py").accumulates


def test_the_script_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    recognise(script)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"x = (", "line 1"),
        (b"\x00", "not Python"),
        (b"# coding: nonsense\n", "not Python"),
        (b"\xff\xfe", "not Python"),
    ],
)
def test_what_is_not_python_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    with pytest.raises(DsplanError, match=says) as caught:
        recognise(script)
    assert "\n" not in str(caught.value)


def test_missing_script_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DsplanError, match="no such script"):
        recognise(tmp_path / "nope.py")
    with pytest.raises(DsplanError, match="is not a file"):
        recognise(tmp_path)
