"""Scripts are read as bash would run them, without running anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from planner.read.form import Source
from planner.read.launchers import argument_settings, count_gpus, launches, override_settings, sbatch_settings
from planner.read.shell import parse_script


def words_of(text: str) -> list[list[str]]:
    script = parse_script(Source(path="x.sh", text=text))
    return [
        [word.text if word.is_resolved else f"?{word.text}" for word in command.words] for command in script.commands
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python a.py --x 1 \\\n  --y 'b c' # end", ["python", "a.py", "--x", "1", "--y", "b c"]),
        ('N=8; python a.py --n "$N" --m=${M:-4}', ["python", "a.py", "--n", "8", "--m=4"]),
        ("export B=2\nA=$((B * 4 + 1))\npython $A", ["python", "9"]),
        ("B=2\npython $(expr 16 / $B) $(date)", ["python", "8", "?$(date)"]),
        ('ARGS=(--a 1\n # note\n --b "2 3")\npython a.py "${ARGS[@]}"', ["python", "a.py", "--a", "1", "--b", "2 3"]),
        ('ARGS="--a 1"\nARGS+=" --b 2"\npython a.py $ARGS', ["python", "a.py", "--a", "1", "--b", "2"]),
        (
            'C="python a.py"\nsrun --nodes=2 bash -c "$C --r \\$SLURM_PROCID"',
            ["srun", "--nodes=2", "python", "a.py", "--r", "?$SLURM_PROCID"],
        ),
        ("if [ $X ]; then N=1; else N=2; fi\npython $N", ["python", "1"]),
        ("for M in one two; do python $M; done", ["python", "one"]),
        ("read -r -d '' F <<EOF\n--a 1 \\\n --b 2\nEOF\npython a.py $F", ["python", "a.py", "--a", "1", "--b", "2"]),
        ("CMD='python a.py'\neval $CMD --x 1", ["python", "a.py", "--x", "1"]),
        ("python a.py $1 ${2:-two}", ["python", "a.py", "?$1", "two"]),
        ("run() {\n python a.py\n}\nrun", ["python", "a.py"]),
        ("for ((i = 1; i < (2 + N); i++)); do\n python a.py\ndone", ["python", "a.py"]),
        ("python a.py > log 2>&1 &", ["python", "a.py"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words in words_of(text)


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    words_of(f"python $(touch {target}) `touch {target}` --x ${{A:=$(touch {target})}}\ntouch {target}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python 'a", "quote ' is never closed"),
        ('python a.py\npython "a', 'line 2: a quote " is never closed'),
        ("A=(1 2", "bracket ( is never closed"),
        ("python $(ls", "bracket ( is never closed"),
        ("cat <<EOF\nx", "never ends"),
        ("A=xxxxxxxxxx\n" + 'A="$A$A"\n' * 40, "grows without end"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(BrokenFile) as refusal:
        parse_script(Source(path="x.sh", text=text))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_comment_cuts_a_command() -> None:
    text = "python a.py \\\n  --x 1 \\\n  # --y 2 \\\n  --z 3\n"
    first = next(command for command in parse_script(Source(path="x.sh", text=text)).commands)
    assert first.is_cut
    assert [word.text for word in first.words] == ["python", "a.py", "--x", "1"]


def test_values_know_their_places() -> None:
    text = 'BATCH=4\nOPTIONS="--rate 2 --size 16"\npython a.py --batch $BATCH $OPTIONS --name="x"\n'
    source = Source(path="x.sh", text=text)
    (launch,) = launches(parse_script(source).commands, source)
    settings, _ = argument_settings(launch.arguments, source)
    assert {item.key: (item.value, text[item.start : item.end]) for item in settings} == {
        "batch": ("4", "4"),
        "rate": ("2", "2"),
        "size": ("16", "16"),
        "name": ("x", "x"),
    }
    assert settings[0].start == text.index("4")


@pytest.mark.parametrize(
    ("text", "gpus", "program"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2 train.py --a 1", 16, "train.py"),
        ("python -m torch.distributed.run --nproc-per-node=4 train.py", 4, "train.py"),
        ("accelerate launch --num_processes 6 --multi_gpu train.py", 6, "train.py"),
        ("deepspeed --include localhost:0,1,3 train.py --deepspeed ds.json", 3, "train.py"),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py", 2, "train.py"),
        ("NPROC_PER_NODE=4 NNODES=2 swift sft --model m", 8, "swift sft"),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\nsrun python -u train.py --x 1", 32, "train.py"),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nnodes 2 train.py", 8, "train.py"),
        ("mpirun -np 16 python train.py", 16, "train.py"),
        ("python train.py", None, "train.py"),
        ("llamafactory-cli train x.yaml", None, "llamafactory-cli train"),
    ],
)
def test_launchers(text: str, gpus: int | None, program: str) -> None:
    source = Source(path="x.sh", text=text)
    (launch,) = launches(parse_script(source).commands, source)
    assert launch.program == program
    assert count_gpus(launch, sbatch_settings(source)).count == gpus


def test_overrides() -> None:
    source = Source(path="x.sh", text="tune run r --config c a.b=1 +c='x' d=[1,2] e=null f=True")
    (launch,) = launches(parse_script(source).commands, source)
    overrides = {item.key: item.value for item in override_settings(launch.arguments, source)}
    assert overrides == {"a.b": 1, "c": "x", "d": [1, 2], "e": None, "f": True}
