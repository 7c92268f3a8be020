"""Hooks stand in modules once these are imported; the outermost user of a library claims the run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from strategies.errors import CannotRun
from strategies.launch.hooks import capabilities, places
from strategies.launch.hooks.accelerate import _accumulates, scripts_settings
from strategies.launch.hooks.places import Place
from strategies.launch.hooks.script_plan import say_replaced
from strategies.run_directory import claim
from strategies.run_directory.claim import Claim, read_claim
from strategies.run_directory.request import PlanRequest, RequestedMethod
from strategies.run_directory.spec import ScriptKind
from strategies.variables import REQUEST, RUN_DIRECTORY

# Two libraries, of which the outer one trains with the inner one, and the hooks of both.
MODULES = {
    "inner_library": "class Wrapper:\n    def __init__(self, model):\n        self.model = model\n",
    "outer_library": "import inner_library\ndef train(model):\n    return inner_library.Wrapper(model).model\n",
    "library_hooks": (
        "SEEN = []\n"
        "def train(original, model):\n    SEEN.append('train')\n    return original(model)\n"
        "def wrap(original, self, model):\n    SEEN.append('wrap')\n    original(self, model)\n"
        "def imported(module):\n    SEEN.append(module.__name__)\n"
    ),
}
PLACES = (
    Place("inner_library", "Wrapper.__init__", "torch", "library_hooks:wrap"),
    Place("outer_library", "train", "accelerate", "library_hooks:train"),
)


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(REQUEST, raising=False)
    claim.forget()
    yield
    claim.forget()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with MODULES, none of which is imported, and no hooks left behind."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _seen() -> list[str]:
    seen: list[str] = _module("library_hooks").SEEN
    return seen


def test_the_outermost_user_claims_and_what_it_uses_passes_through(library: Path) -> None:
    places.install(PLACES)
    assert "library_hooks" not in sys.modules
    outer = _module("outer_library")
    assert "library_hooks" not in sys.modules  # an import alone costs nothing
    assert outer.train(7) == 7
    assert (_seen(), claim.claimed()) == (["train"], "accelerate")
    _module("inner_library").Wrapper(8)
    assert outer.train(9) == 9
    assert (_seen(), claim.claimed()) == (["train", "train"], "accelerate")


def test_who_is_used_alone_claims(library: Path) -> None:
    places.install(PLACES)
    assert _module("inner_library").Wrapper(8).model == 8
    assert (_seen(), claim.claimed()) == (["wrap"], "torch")


def test_modules_that_are_there_already_get_their_hooks(library: Path) -> None:
    inner = _module("inner_library")
    places.install(PLACES)
    inner.Wrapper(8)
    assert _seen() == ["wrap"]


def test_a_place_without_a_name_gets_the_module(library: Path) -> None:
    places.install([Place("inner_library", "", "plain", "library_hooks:imported")])
    assert "library_hooks" not in sys.modules
    module: ModuleType = _module("inner_library")
    assert _seen() == ["inner_library"]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is SourceFileLoader
    assert "exec_module" not in vars(module.__spec__.loader)


def test_a_module_that_is_not_there_is_missed_as_before(library: Path) -> None:
    places.install([Place("no_such_library", "train", "torch", "library_hooks:train")])
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        _module("no_such_library")


def test_the_places_are_where_the_libraries_have_them() -> None:
    for hooked in places.PLACES:
        try:
            value: Any = importlib.import_module(hooked.module)
        except ImportError:
            pytest.skip(f"{hooked.module} is not installed")
        for part in filter(None, hooked.name.split(".")):
            value = getattr(value, part)
        module, _, name = hooked.hook.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_a_claim_is_kept_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    assert read_claim(tmp_path) is None
    kinds: list[ScriptKind] = []
    claim.once_claimed(kinds.append)
    with claim.own_work(), claim.use("torch") as is_outermost:
        assert not is_outermost
    claim.note_unplanned(12)
    assert read_claim(tmp_path) == Claim(kind="plain", parameters=12)
    with claim.use("huggingface") as is_outermost, claim.use("accelerate") as is_inside:
        assert (is_outermost, is_inside) == (True, False)
    assert read_claim(tmp_path) == Claim(kind="huggingface")
    assert kinds == ["huggingface"]


@pytest.mark.parametrize(
    ("kind", "strategy", "backend", "gpus", "says"),
    [
        ("huggingface", "zero3", None, False, ""),
        ("huggingface", "zero3", None, True, ""),
        ("huggingface", "hsdp", None, True, "HF Trainer cannot run hsdp on GPUs"),
        ("accelerate", "fsdp", None, False, ""),
        ("accelerate", "zero2", "deepspeed", False, "accelerate cannot run zero2 without a GPU with backend deepspeed"),
        ("deepspeed", "fsdp", None, False, "DeepSpeed cannot run fsdp without a GPU"),
        ("deepspeed", "zero2", None, False, ""),
        ("huggingface", "zero3", "native", True, ""),
        ("huggingface", "fsdp", "native", True, "HF Trainer cannot run fsdp on GPUs with backend native; its "),
        ("accelerate", None, "deepspeed", False, "accelerate cannot run anything without a GPU with backend deepspeed"),
        ("accelerate", None, "deepspeed", True, ""),
        ("torch", "zero1", "native", False, ""),
    ],
)
def test_what_a_library_can_run(
    kind: ScriptKind, strategy: str | None, backend: str | None, gpus: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend:
        monkeypatch.setenv(REQUEST, PlanRequest(backend=backend).to_variables()[REQUEST])
    message = ""
    try:
        capabilities.require_possible(kind, strategy, gpus=gpus)
    except CannotRun as refusal:
        message = str(refusal)
    assert message.startswith(says)
    assert bool(message) is bool(says)


@pytest.mark.parametrize("kind", ["huggingface", "accelerate", "deepspeed", "lightning", "torch"])
def test_a_library_that_trains_whole_models_refuses_to_split_one(
    kind: ScriptKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUEST, '{"degrees": {"tp": 1, "pp": 2}}')
    with pytest.raises(CannotRun, match=r"trains whole models here, and pp 2 splits them; call dsplan\.initialize"):
        capabilities.require_possible(kind, None, gpus=False)
    assert capabilities.requested_flags() == "--tp 1 --pp 2"


@pytest.mark.parametrize("kind", ["huggingface", "accelerate", "deepspeed", "lightning", "torch"])
def test_a_library_that_trains_the_scripts_modules_refuses_to_change_them(
    kind: ScriptKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = RequestedMethod(method="lora", lora_rank=4)
    request = PlanRequest(method=method, kernels={"rms_norm": "liger", "all": "auto"})
    monkeypatch.setenv(REQUEST, request.to_variables()[REQUEST])
    flags = "--method lora --lora-rank 4 --kernels rms_norm=liger,auto"
    with pytest.raises(CannotRun, match=f"the modules that the script made, and {flags} changes them; call dsplan"):
        capabilities.require_possible(kind, None, gpus=False)
    assert capabilities.requested_flags() == flags


@pytest.mark.parametrize(
    ("parallel", "own"),
    [
        ({"cp_size": 2}, r"TrainingArguments\.parallelism_config \(cp 2\)"),
        ({}, r"from_pretrained\(tp_plan=...\) \(tp 2\)"),
    ],
)
def test_a_trainer_that_splits_its_model_itself_is_refused_without_a_gpu(parallel: dict[str, int], own: str) -> None:
    huggingface = pytest.importorskip("strategies.launch.hooks.huggingface")
    settings = SimpleNamespace(parallelism_config=SimpleNamespace(**parallel) if parallel else None)
    split = huggingface._own_split(SimpleNamespace(tp_size=2), settings)
    with pytest.raises(CannotRun, match=f"the script splits its model by {own}, which accelerate runs on GPUs alone"):
        huggingface._require_own_split(split)
    assert huggingface._own_split(nn.Linear(1, 1), SimpleNamespace()) == ""


def test_what_was_asked_and_not_applied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities.refuse_unplanned_step()
    capabilities.refuse_unapplied()
    monkeypatch.setenv(REQUEST, '{"strategy": "zero3", "backend": "native"}')
    with pytest.raises(CannotRun, match=r"zero3 --backend native cannot be applied: test_claims.py, line \d+"):
        capabilities.refuse_unplanned_step()
    with pytest.raises(CannotRun, match="was not applied: the script ended without training anything"):
        capabilities.refuse_unapplied()
    claim.take_over(is_planned=True)
    capabilities.refuse_unplanned_step()
    capabilities.refuse_unapplied()


CALLS = "def main(look):\n    return look()\n"
INSIDE = "def main(look):\n    def loop(a):\n        a.accumulate(1)\n    return look()\n"
LOOPS = {
    "in the module that calls": (CALLS + "def loop(a):\n    a.accumulate(1)\n", True),
    "in a method": (CALLS + "class T:\n    def fit(self, a):\n        a.accumulate(1)\n", True),
    "in the function itself": (INSIDE, True),
    "nowhere": (CALLS, False),
}


@pytest.mark.parametrize("where", LOOPS)
def test_whether_the_code_around_prepare_accumulates(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = LOOPS[where]
    (tmp_path / "loop_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    accumulates = _module("loop_module").main(lambda: _accumulates(sys._getframe(1)))
    sys.modules.pop("loop_module")
    assert accumulates is expected


@pytest.mark.parametrize(
    ("given", "steps", "words"),
    [
        ({}, 1, ""),
        ({"mixed_precision": "no"}, 1, ""),
        ({}, 4, "dsplan: the plan replaces gradient_accumulation_steps 1 -> 4\n"),
        ({"gradient_accumulation_steps": 2}, 1, "dsplan: the plan replaces gradient_accumulation_steps 2 -> 1\n"),
    ],
)
def test_what_the_plan_leaves_as_accelerate_has_it_is_not_called_replaced(
    given: dict[str, Any], steps: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = {"gradient_accumulation_steps": steps, "mixed_precision": "no"}
    say_replaced(scripts_settings(given), planned)
    assert capsys.readouterr().out == words
