"""All that `pip install dsplan` brings: the wheel, what it asks for, and the pinned versions of its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from scripts.generate.bill_of_materials import write_bill
from scripts.report.data_licences import cited, data_files, own

ROOT = Path(__file__).parents[1]
ROOMS = ("dsplan", "hardware_db", "planner", "strategies")
KINDS = {".py", ".yaml", ".json", ".css", ".js", ".typed"}
QUESTION = ("recommend", "--model", "opt-6.7b", "--gpus", "8")


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


_LINES = (line.partition("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines())
PINS = {normal(name): version for name, _, version in _LINES if version}


def command(*words: str | Path, **more: str) -> str:
    """Return what a command prints.

    Raises:
        AssertionError: it fails; with what it printed.
    """
    # Not in the tree: Python would find its rooms, and pip what says that they are installed.
    ran = subprocess.run(words, cwd="/", env={**os.environ, **more}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree as it is, elsewhere: a build leaves files behind."""
    directory = tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    command(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory / "dist", directory)
    (built,) = (directory / "dist").iterdir()
    return built


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_the_four_rooms_and_what_planning_reads(wheel: Path) -> None:
    paths = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in KINDS}
    assert files_of(wheel) == {path.as_posix() for path in paths if path.parts[:2] != ("hardware_db", "measurements")}
    assert not [name for name in files_of(wheel) if re.search(r"(^|/)(tests?|scripts|measurements)/|\\.csv$", name)]


def test_check_wheel_contents_finds_nothing(wheel: Path) -> None:
    shown = command(sys.executable, "-m", "check_wheel_contents", "--config", ROOT / "pyproject.toml", wheel)
    assert shown.strip().endswith(": OK")


def test_planning_asks_for_no_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(file), validate=True)
    always = {one.name for one in metadata.requires_dist or [] if one.marker is None}
    assert always == {"typer", "rich", "pyyaml", "nvidia-ml-py", "msgspec", "psutil"}
    assert not {"torch", "numpy", "transformers"} & closure(always)
    assert str(metadata.requires_python) == ">=3.10"


def closure(names: set[str]) -> set[str]:
    """Distributions with everything that they ask for, as installed here."""
    waiting, seen = [*names], set(names)
    while waiting:
        for text in distribution(waiting.pop()).requires or ():
            needs = Requirement(text)
            if (needs.marker is None or needs.marker.evaluate({"extra": ""})) and needs.name not in seen:
                seen.add(needs.name)
                waiting.append(needs.name)
    return seen


def test_the_wheel_answers_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With the pinned packages that it asks for and no others; the network is not asked."""
    environment, packages = tmp_path / "venv", tmp_path / "packages"
    venv.create(environment, with_pip=False, symlinks=True)
    packages.mkdir()
    for name in closure({"typer", "rich", "pyyaml", "nvidia-ml-py", "msgspec", "psutil"}):
        for file in distribution(name).files or ():
            source = Path(str(distribution(name).locate_file(file.parts[0])))
            if file.parts[0] not in ("..", "__pycache__") and not (packages / file.parts[0]).exists():
                (packages / file.parts[0]).symlink_to(source)
    python = environment / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check")
    alone = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "DSPLAN_HOME": str(tmp_path / "home")}
    command(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, **alone)
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "pinned.pth").write_text(f"{packages}\n", encoding="utf-8")
    command(python, "-c", f"import dsplan; assert dsplan.__file__.startswith({str(site)!r}), dsplan.__file__", **alone)
    command(python, "-c", "import importlib.util as u; assert not u.find_spec('torch'), 'torch'", **alone)
    answer = json.loads(command(environment / "bin" / "dsplan", *QUESTION, "--json", **alone))
    assert answer["plans"][0]["verdict"] == "fits"


def interpreters() -> list[str]:
    """Of each version from `Requires-Python` on that this machine has, one that runs."""
    folders = [*Path.home().glob(".pyenv/versions/3.*/bin"), *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    by_version: dict[str, str] = {}
    for version in (f"3.{minor}" for minor in range(10, 20)):
        for program in (folder / f"python{version}" for folder in folders):
            if version not in by_version and os.access(program, os.X_OK):
                ran = subprocess.run([program, "-c", ""], capture_output=True, check=False)
                by_version |= {version: str(program)} if ran.returncode == 0 else {}
    return list(by_version.values())


def test_the_oldest_and_the_newest_interpreter_that_is_here_compile_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Ruff and mypy hold all to 3.10 (`target-version`, `python_version`); the long checks install it in each."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import ast, pathlib, sys\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py'): compile(path.read_bytes(), str(path), 'exec')"
    )
    for python in {*interpreters()[:1], *interpreters()[-1:]}:
        command(python, "-W", "error::SyntaxWarning", "-c", program, tmp_path)
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'requires-python = ">=3.10"' in settings
    assert 'target-version = "py310"' in settings
    assert 'python_version = "3.10"' in settings


@pytest.mark.slow  # asks the package index
def test_every_interpreter_that_is_here_installs_the_wheel_and_answers(wheel: Path, tmp_path: Path) -> None:
    for python in interpreters():
        environment = tmp_path / Path(python).name
        command(python, "-m", "venv", environment)
        command(environment / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
        alone = {"PYTHONPATH": "", "DSPLAN_HOME": str(tmp_path / "home")}
        assert "fits" in command(environment / "bin" / "dsplan", *QUESTION, **alone)


def test_every_pinned_version_has_its_hashes() -> None:
    text = (ROOT / "constraints.hashes.txt").read_text("utf-8")
    blocks = dict(re.findall(r"^([\w.-]+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE))
    assert set(blocks) == {f"{name}=={version}" for name, version in PINS.items()}
    assert len(text.splitlines()) == sum(block.count("\n") + 1 for block in blocks.values())
    assert "://" not in text


def test_every_extra_is_pinned(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(file), validate=True)
    for one in metadata.requires_dist or []:
        version = PINS[normal(one.name)]
        assert one.specifier.contains(version), f"{one} and {version} of constraints.txt"


@pytest.mark.slow  # 14 seconds of a processor: it is checked against CycloneDX's schema
def test_the_bill_of_materials_names_what_is_pinned(tmp_path: Path) -> None:
    write_bill(tmp_path / "bill.json")
    bill = json.loads((tmp_path / "bill.json").read_text("utf-8"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "dsplan")
    named = {normal(part["name"]): part["version"].partition("+")[0] for part in bill["components"]}
    both = named.keys() & PINS.keys()
    assert len(both) > 0.9 * len(PINS)
    assert {name: named[name] for name in both} == {name: PINS[name] for name in both}
    assert sum(bool(part.get("licenses")) for part in bill["components"]) > 0.9 * len(named)


@pytest.mark.parametrize("file", data_files())
def test_every_data_file_says_where_it_comes_from(file: str) -> None:
    """If it cites, every row with a figure does."""
    assert own(file) is not None or all(cited(file))
