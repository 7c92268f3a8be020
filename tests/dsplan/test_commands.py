"""Commands of other launchers, as runs of dsplan's own: what is understood of them, what is refused, and real runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsplan.commands import StartedScript, is_command, started_script, understand
from hardware_db.errors import DsplanError
from strategies.launch.options import RequestedPlacement
from strategies.launch.prepare import RunRequest, prepare
from strategies.run_directory.request import PlanRequest
from tests.strategies.faults.faulty_run import FaultyRun
from tests.strategies.launch.command import EXAMPLES, run

LAUNCHED = Path(__file__).parents[1] / "strategies" / "launch"

# A loop that writes down how it was started.
LOOP = """
import json, os, sys, torch
from pathlib import Path
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
kept = {name: os.environ.get(name) for name in ("MARK", "WORLD_SIZE")}
Path(f"started{os.environ['RANK']}.json").write_text(json.dumps([__name__, __package__, sys.argv[1:], kept]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("NPROC_PER_NODE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(LOOP)
    return tmp_path


def started(text: str) -> StartedScript:
    assert is_command(text.split()[0])
    return started_script(text.split())


@pytest.mark.parametrize(
    ("command", "processes", "arguments"),
    [
        ("torchrun --nproc_per_node=4 train.py --lr 1e-3", 4, ("--lr", "1e-3")),
        ("torchrun --standalone --nproc-per-node gpu train.py -x", None, ("-x",)),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", 3, ()),
        ("python3.11 -u train.py --flag", None, ("--flag",)),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", 2, ("--deepspeed", "ds.json")),
        ("deepspeed --include localhost:0,3 train.py", 2, ()),
        ("accelerate launch --num_processes 8 --num_machines 2 train.py a b", 4, ("a", "b")),
        ("accelerate launch --multi_gpu train.py", None, ()),
        ("env NPROC_PER_NODE=5 torchrun train.py", 5, ()),
        ("/usr/bin/torchrun --nproc_per_node 2 train.py", 2, ()),
    ],
)
def test_scripts_behind_launchers(folder: Path, command: str, processes: int | None, arguments: tuple[str]) -> None:
    read = started(command)
    assert (read.script, read.processes, read.arguments) == (Path("train.py"), processes, arguments)


def test_what_a_launcher_hands_on(folder: Path) -> None:
    assert started("deepspeed train.py").start.local_rank == "--local_rank"
    assert started("deepspeed --no_local_rank train.py").start.local_rank == ""
    assert started("deepspeed --include localhost:0,3 train.py").start.variables == {"CUDA_VISIBLE_DEVICES": "0,3"}
    assert started("MARK=one torchrun train.py").start.variables == {"MARK": "one"}
    assert started("torchrun --max_restarts 3 train.py").retries == 3
    module = started("torchrun --nproc_per_node 2 -m package.train --x")
    assert (module.start.module, module.script) == ("package.train", folder / "package" / "train.py")
    nodes = started("torchrun --nnodes 2:4 --rdzv_endpoint host:1234 --nproc_per_node 8 train.py")
    assert nodes.placement == RequestedPlacement(nodes="2:4", rendezvous="host:1234")
    assert "--tee of torchrun does nothing here" in started("torchrun --tee 3 train.py").notices[0]
    flags = started("accelerate launch --num_processes 2 --mixed_precision bf16 --dynamo_backend inductor train.py")
    assert flags.start.accelerate == (
        *("--num_processes", "2", "--mixed_precision", "bf16", "--dynamo_backend", "inductor"),
    )


def test_the_config_of_accelerate(folder: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    (folder / "fsdp.yaml").write_text(text)
    read = started("accelerate launch --config_file fsdp.yaml train.py")
    assert (read.processes, read.strategy) == (4, "fsdp")
    assert read.start.accelerate == ("--config_file", str(folder / "fsdp.yaml"))
    assert started("accelerate launch --config_file fsdp.yaml --num_processes 2 train.py").processes == 2
    default = folder / "hub" / "accelerate"
    default.mkdir(parents=True)
    (default / "default_config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    plain = started("accelerate launch train.py")
    assert (plain.processes, plain.strategy) == (3, None)
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 8}')
    (folder / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    assert started("accelerate launch --config_file zero.yaml train.py").strategy == "zero3"


def test_flags_of_dsplan_win(folder: Path) -> None:
    (folder / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    words = ("launch", "--config_file", "fsdp.yaml", "train.py", "--x")
    request = RunRequest(script=Path("accelerate"), arguments=words, run_directory=folder / "run")
    launch = prepare(*understand(request))
    assert (launch.spec.processes, launch.spec.arguments) == (4, ("--x",))
    assert PlanRequest.of(launch.spec.environment).strategy == "fsdp"
    assert "chooses fsdp" in launch.notices[0]
    chosen = RunRequest(
        script=Path("accelerate"), arguments=words, processes=2, plan=PlanRequest(strategy="ddp"),
        run_directory=folder / "other",
    )  # fmt: skip
    other = prepare(*understand(chosen))
    assert (other.spec.processes, PlanRequest.of(other.spec.environment).strategy) == (2, "ddp")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("axolotl train x.yml", "pip install axolotl"),
        ("llamafactory-cli train x.yaml", "pip install llamafactory"),
        ("swift sft --model x", "pip install ms-swift"),
        ("megatron sft --model x", "pip install ms-swift"),
        ("tune run lora_finetune_single_device --config x", "pip install torchtune"),
        ("accelerate test", "accelerate launch SCRIPT"),
        ("accelerate launch --no_python train.py", "no Python"),
        ("torchrun --nproc_per_node 2", "names no Python file"),
        ("torchrun -m package.nothing", "module package.nothing is not here"),
        ("srun -N 2 python train.py", "--launcher slurm"),
        ("uv run torchrun train.py", "put it first"),
        ("python -m verl.trainer.main_ppo data.x=1", "Ray"),
        ("accelerate launch --config_file none.yaml train.py", "none.yaml"),
        ("trl vllm-serve --model x", "is no training"),
    ],
)
def test_refused_in_one_line(folder: Path, command: str, words: str) -> None:
    with pytest.raises(DsplanError) as refusal:
        started(command)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_of_a_launchers_name_is_a_script(folder: Path) -> None:
    (folder / "deepspeed").write_text("")
    assert not is_command("deepspeed")
    assert is_command("torchrun")
    assert not is_command("train.py")


Package = Callable[[str, str], None]


@pytest.fixture
def package(folder: Path) -> Package:
    """Put a file of a trainer into a package of its name, which stands in for the trainer itself."""

    def put(path: str, text: str) -> None:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        top = folder / Path(path).parts[0]
        (top / "__init__.py").touch()

    return put


def test_trainers_commands_are_their_modules(folder: Path, package: Package) -> None:
    package("axolotl/cli/train.py", LOOP)
    package("llamafactory/launcher.py", LOOP)
    package("swift/cli/sft.py", LOOP)
    axolotl = started("axolotl train x.yml --launcher accelerate --micro-batch-size 2 -- --num_processes 4")
    assert (axolotl.start.module, axolotl.arguments) == ("axolotl.cli.train", ("x.yml", "--micro-batch-size", "2"))
    assert (axolotl.processes, axolotl.start.by_accelerate) == (4, True)
    assert not started("axolotl train x.yml --launcher torchrun").start.by_accelerate
    factory = started("llamafactory-cli train x.yaml learning_rate=1e-4")
    assert (factory.start.module, factory.arguments) == ("llamafactory.launcher", ("x.yaml", "learning_rate=1e-4"))
    assert started("NPROC_PER_NODE=2 swift sft --model a").processes == 2
    (folder / "swift.yaml").write_text("model: a\ntarget_modules: [q, k]\n")
    assert started("swift sft swift.yaml --lr 1").arguments == (
        *("--model", "a", "--target_modules", "q", "k", "--lr", "1"),
    )
    trl = started("trl sft --accelerate_config fsdp1 --num_processes 2 --model_name_or_path gpt2")
    assert (trl.start.module, trl.arguments) == ("trl.scripts.sft", ("--model_name_or_path", "gpt2"))
    assert (trl.processes, trl.strategy) == (2, "fsdp")


def test_torchtune_recipes_by_name(folder: Path, package: Package) -> None:
    registry = (
        'A = [Recipe(name="full", file_path="full.py", configs=[Config(name="s/full", file_path="s/full.yaml")])]'
    )
    package("torchtune/_recipe_registry.py", f"raise SystemExit('is run')\n{registry}\n")
    package("recipes/full.py", LOOP)
    read = started("tune run --nproc_per_node 2 full --config s/full batch_size=1")
    assert (read.script, read.processes) == (folder / "recipes" / "full.py", 2)
    assert read.arguments == ("--config", str(folder / "recipes" / "configs" / "s" / "full.yaml"), "batch_size=1")
    with pytest.raises(DsplanError, match="no such recipe"):
        started("tune run none --config x")


@pytest.mark.slow
def test_deepspeeds_command_on_a_process(folder: Path) -> None:
    """The script of `deepspeed` gets the rank on its node as a flag, as from DeepSpeed's own launcher."""
    finished = run("--nproc", "1", "--json", "env", "MARK=one", "deepspeed", "train.py", "--x", "a b", cwd=folder)
    assert finished.status == 0, finished.err
    assert finished.json["measured"]["steps"] == 2
    kept = {"MARK": "one", "WORLD_SIZE": "1"}
    assert json.loads((folder / "started0.json").read_text()) == [
        *("__main__", ""), ["--local_rank=0", "--x", "a b"], kept,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_module_behind_torchrun(folder: Path) -> None:
    finished = run(
        *("--run-dir", "run", "--json", "torchrun", "--nproc_per_node", "2", "-m", "package.train", "--x"), cwd=folder
    )
    assert finished.status == 0, finished.err
    for rank in "01":
        name, package, arguments, kept = json.loads((folder / f"started{rank}.json").read_text())
        assert (name, package, arguments, kept["WORLD_SIZE"]) == ("__main__", "package", ["--x"], "2")


@pytest.mark.slow
def test_accelerates_own_script_is_planned(folder: Path) -> None:
    """The precision and the strategy are those of accelerate's command, the batch of the plan's own."""
    (folder / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")
    (folder / "out").mkdir()
    for source in (LAUNCHED / "accelerate_script.py", EXAMPLES / "stdlib_text.py"):
        shutil.copy(source, folder)
    script = "accelerate_script.py"
    finished = run(
        *("--json", "accelerate", "launch", "--config_file", "fsdp.yaml", "--mixed_precision", "bf16", script, "out"),
        cwd=folder,
    )
    assert finished.status == 0, finished.err
    plan = finished.json["plan"]["plan"]
    assert (plan["strategy"], plan["precision"], plan["dp_shard"]) == ("fsdp", "bf16", 2)
    assert finished.json["measured"]["ranks"] == 2
    assert finished.json["measured"]["steps"] == 8
    assert finished.json["trained_with"] == "accelerate"
    assert len(json.loads((folder / "out" / "losses.json").read_text())) == 8


def test_a_run_of_a_command_is_resumed_as_it_began(folder: Path) -> None:
    """`--resume DIR` alone starts what the command started: module, arguments, variables, accelerate's flags."""
    (folder / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 3\n")
    for number, command in enumerate(
        (
            "accelerate launch --config_file fsdp.yaml --mixed_precision bf16 train.py --x 1",
            "env MARK=one torchrun --nproc_per_node 3 --max_restarts 7 -m package.train --y",
            "deepspeed --num_gpus 3 train.py --deepspeed ds.json",
        )
    ):
        directory = folder / f"run{number}"
        first, *rest = command.split()
        begun = prepare(*understand(RunRequest(script=Path(first), arguments=tuple(rest), run_directory=directory)))
        begun.spec.save()
        resumed = prepare(*understand(RunRequest(resume=directory)))
        assert resumed.resumes
        assert resumed.spec == replace(begun.spec, environment=resumed.spec.environment)
        assert PlanRequest.of(resumed.spec.environment) == PlanRequest.of(begun.spec.environment)
        again = prepare(*understand(RunRequest(script=Path(first), arguments=tuple(rest), resume=directory)))
        assert again.spec == resumed.spec


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["accelerate launch --num_processes 2", "torchrun --nproc_per_node 2"])
def test_a_killed_rank_of_a_command_changes_no_loss(folder: Path, launcher: str) -> None:
    """HF Trainer behind another launcher: `kill -9` of a rank behind step 8 of 10, saved every 3."""
    for source in (LAUNCHED / "trainer_script.py", EXAMPLES / "stdlib_text.py"):
        shutil.copy(source, folder)
    trained = {}
    for word in ("quiet", "faulty"):
        output = folder / word
        command = (*launcher.split(), "trainer_script.py", str(output), word)
        finished = run("--strategy", "ddp", "--retries", "1", "--json", *command, cwd=folder)
        assert finished.status == 0, finished.err
        trained[word] = json.loads(output.with_suffix(".losses").read_text())
    endings = [attempt["ending"]["kind"] for attempt in finished.json["attempts"] if attempt["ending"]]
    assert endings == ["killed"]
    assert "resumes at step 6 from" in finished.err
    assert (len(trained["quiet"]), trained["faulty"]) == (10, trained["quiet"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_killed_whole_is_resumed_at_its_step(tmp_path: Path) -> None:
    """`kill -9` of everything behind step 9 of 20, saved every 4, then `--resume DIR` and nothing else."""
    sizes = ("--steps", "20", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence-length", "64")
    command = ("torchrun", "--nproc_per_node", "2", str(EXAMPLES / "train_gpt.py"), *sizes)
    options = ("--strategy", "fsdp", "--checkpoint-steps", "4")
    losses = {}
    for name in ("quiet", "killed"):
        with FaultyRun(tmp_path / name, {}, options=options, script=command) as faulty:
            faulty.start()
            if name == "killed":
                assert faulty.until(lambda: len(noted(faulty)) >= 9, "step 9", every=0.01), faulty.out
                for pid in faulty.processes():
                    os.kill(pid, signal.SIGKILL)
                assert faulty.wait() == -signal.SIGKILL
                faulty.resume()
            assert faulty.wait() == 0, faulty.out
            losses[name] = noted(faulty)
    assert faulty.events("attempt")[-1]["saved"] in (8, 12)
    assert losses["killed"] == losses["quiet"]
    assert len(losses["quiet"]) == 20


def noted(faulty: FaultyRun) -> dict[int, float]:
    """The last loss that rank 0 has noted of each step, of lines that are whole."""
    path = faulty.run_directory / "metrics-rank0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["global_step"]: row["loss"] for row in rows if row["event"] == "step"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_loop_of_accelerates_is_not_begun_again_in_silence(folder: Path) -> None:
    """It saves by itself alone: one line says that dsplan has no checkpoint of it, and nothing is trained twice."""
    for source in (LAUNCHED / "accelerate_script.py", EXAMPLES / "stdlib_text.py"):
        shutil.copy(source, folder)
    script = (folder / "accelerate_script.py").read_text()
    counts = "completed += 1"
    kills = "__import__('os').kill(__import__('os').getpid(), 9)"
    dies = f"{counts}\n                if completed == 6 and not resumes: {kills}"
    assert script.count(counts) == 1
    saves = 'accelerator.save_state(str(output / "state"))'
    noted = f'{saves}\n            (output / "losses.json").write_text(json.dumps(losses))'
    assert script.count(saves) == 1
    (folder / "dying.py").write_text(script.replace(counts, dies).replace(saves, noted))
    (folder / "out").mkdir()
    command = ("accelerate", "launch", "--num_processes", "2", "dying.py", "out")
    finished = run("--run-dir", "run", "--strategy", "ddp", *command, cwd=folder)
    assert finished.status not in (0, 2), finished.err
    assert "killed" in finished.err
    resumed = run("--resume", "run", *command, "resume", cwd=folder)
    assert resumed.status == 0, resumed.err
    assert "resumes from what its own code loads: dsplan keeps no checkpoint of it" in resumed.err
    assert len(json.loads((folder / "out" / "resumed.json").read_text())) == 8
