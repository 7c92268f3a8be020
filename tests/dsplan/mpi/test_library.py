"""dsplan.mpi under the real mpirun, on two to four ranks, against numpy and torch. Each body is one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsplan.mpi.mpi_start import HERE, bodies, mpirun, needs_mpi, outcomes, run_bodies

pytestmark = needs_mpi


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", bodies("mpi_gradients"))
def test_gradients_groups_and_timers(body: str, ranks: int) -> None:
    assert outcomes("mpi_gradients", ranks)[body] == []


@pytest.mark.parametrize("body", bodies("mpi_zero"))
def test_zero(body: str) -> None:
    assert outcomes("mpi_zero", 3)[body] == []


@pytest.mark.parametrize("body", bodies("mpi_tensors"))
def test_torch_tensors(body: str) -> None:
    pytest.importorskip("torch")
    assert outcomes("mpi_tensors", 2)[body] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Checkpoints that three ranks have saved, and what became of each body meanwhile."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, run_bodies("mpi_saving", 3, directory)


@pytest.mark.parametrize("body", bodies("mpi_saving"))
def test_saving(body: str, saved: tuple[Path, dict[str, list[str]]]) -> None:
    assert saved[1][body] == []


@pytest.fixture(scope="module")
def loaded(saved: tuple[Path, dict[str, list[str]]]) -> dict[int, dict[str, list[str]]]:
    """Return what became of loading on fewer and on more ranks."""
    return {ranks: run_bodies("mpi_loading", ranks, saved[0]) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", bodies("mpi_loading"))
def test_loading_on_other_numbers_of_ranks(body: str, ranks: int, loaded: dict[int, dict[str, list[str]]]) -> None:
    assert loaded[ranks][body] == []


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first = mpirun(3, HERE / "mpi_killed.py", tmp_path)
    assert first.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000002.tmp", "latest", "step-00000001"]
    again = mpirun(3, HERE / "mpi_killed.py", tmp_path)
    assert (again.returncode, again.stdout.strip()) == (0, "latest 1"), again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def test_the_program_of_the_docs_trains_and_resumes_with_other_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/mpi.md").read_text(encoding="utf-8")
    program = tmp_path / "train.py"
    program.write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    lines = []
    for ranks in (3, 2):
        finished = mpirun(ranks, "-m", "mpi4py", program, tmp_path / "checkpoints")
        assert finished.returncode == 0, finished.stderr
        lines += [line for line in finished.stdout.splitlines() if line.startswith("step")]
    steps = [int(line.split()[1].strip(":")) for line in lines]
    losses = [float(line.split()[3]) for line in lines]
    assert steps == [100, 200]
    assert losses[1] < losses[0]
