"""Public training scripts that are run: their commits, their arguments, and each line that had to be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A public repository at one commit."""

    name: str
    """`owner/name` on GitHub."""
    commit: str
    """The commit, or the tag, that was run."""
    folders: tuple[str, ...]
    """The folders that the scripts need; a repository's top level comes with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Lines of a script that are not what they must be on this machine."""

    file: str
    """The file, relative to the project."""
    old: str
    """What stands there."""
    new: str
    """What it is replaced by."""
    why: str
    """The reason, for the table."""
    lines: int = 1
    """How many lines it changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A script and how it is called."""

    name: str
    """The name in the table."""
    project: str
    """The key of its project in PROJECTS."""
    script: str
    """The file, relative to the project."""
    library: str
    """What it trains with."""
    arguments: tuple[str, ...] = ()
    """Its arguments; `{out}` is an output folder of the run, `{data}` the folder of the data."""
    edits: tuple[Edit, ...] = ()
    """What has to be changed for a CPU or for today's versions."""
    inside: bool = False
    """Whether it runs in a copy of its own folder and not in the folder of the data."""
    ranks: int = 2
    """How many ranks it can have on a CPU."""
    is_seeded: bool = True
    """Whether two runs of it have the same losses."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it reads, with the same words in braces as the arguments."""

    @property
    def edited_lines(self) -> int:
        """Return how many lines had to be changed."""
        return sum(edit.lines for edit in self.edits)


PROJECTS: Mapping[str, Project] = {
    "accelerate": Project(
        name="huggingface/accelerate", commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", folders=("examples",)
    ),
    "alpaca": Project(
        name="tatsu-lab/stanford_alpaca", commit="761dc5bfbdeeffa89b8bff5d038781a4055f796a", folders=("configs",)
    ),
    "deepspeed-examples": Project(
        name="deepspeedai/DeepSpeedExamples",
        commit="45b4b7156c8794a3452a5a7d03dbd8d797068569",
        folders=("training/cifar", "training/HelloDeepSpeed"),
    ),
    "lightning": Project(
        name="Lightning-AI/pytorch-lightning",
        commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
        folders=("examples",),
    ),
    "nanochat": Project(
        name="karpathy/nanochat",
        commit="92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        folders=("nanochat", "scripts", "tasks"),
    ),
    "nanogpt": Project(
        name="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        folders=("config", "data/shakespeare_char"),
    ),
    "peft": Project(
        name="huggingface/peft",
        commit="5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        folders=("examples/sft", "examples/olora_finetuning"),
    ),
    "pytorch-examples": Project(
        name="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", folders=("distributed",)
    ),
    "transformers": Project(
        name="huggingface/transformers",
        commit="v4.57.5",
        folders=("examples/pytorch/language-modeling", "examples/pytorch/text-classification"),
    ),
    "trl": Project(name="huggingface/trl", commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8", folders=("trl/scripts",)),
}

_TRAINER = ("--max_steps", "12", "--logging_steps", "1", "--output_dir", "{out}", "--report_to", "none", "--use_cpu")
_SAVES = ("--save_strategy", "no")
_BATCH = ("--per_device_train_batch_size", "2")
_LLAMA = ("--model_name_or_path", "tiny-llama")
_TRL = (*_LLAMA, *_BATCH, "--max_length", "64", "--bf16", "false", *_TRAINER, *_SAVES)
_CLM = ("--train_file", "text.txt", "--validation_file", "text-val.txt", "--block_size", "64")
_CLM_FOLDER = "examples/pytorch/language-modeling"
_GLUE_FOLDER = "examples/pytorch/text-classification"
_DISTRIBUTED = "distributed"
_NEEDS_CUDA = "asks for CUDA whatever the machine has"
_OPENAI = "imports a client of 2023 that its data generation needs, not its training"
_VERSIONS = "calls a name that its library has no longer"


def _any_machine(file: str) -> Edit:
    """Drop the check of pytorch/examples that ends a script on a machine with fewer than two GPUs."""
    return Edit(file=file, old="return has_gpu and gpu_count >= min_gpus", new="return True", why=_NEEDS_CUDA)


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="transformers run_clm",
        project="transformers",
        script=f"{_CLM_FOLDER}/run_clm.py",
        library="HF Trainer",
        arguments=("--model_name_or_path", "tiny-gpt2", *_CLM, "--do_train", *_BATCH, *_TRAINER, *_SAVES),
    ),
    Recipe(
        name="transformers run_glue",
        project="transformers",
        script=f"{_GLUE_FOLDER}/run_glue.py",
        library="HF Trainer",
        arguments=(
            *("--model_name_or_path", "bert-base-cased", "--train_file", "nyu-mll/glue/train.csv"),
            *("--validation_file", "nyu-mll/glue/validation.csv", "--do_train", "--max_seq_length", "64"),
            *(*_BATCH, *_TRAINER, *_SAVES),
        ),
    ),
    Recipe(
        name="transformers run_clm_no_trainer",
        project="transformers",
        script=f"{_CLM_FOLDER}/run_clm_no_trainer.py",
        library="accelerate",
        arguments=(
            *("--model_name_or_path", "tiny-gpt2", *_CLM, *_BATCH),
            *("--max_train_steps", "12", "--seed", "0", "--output_dir", "{out}"),
        ),
        edits=(
            Edit(
                file=f"{_CLM_FOLDER}/run_clm_no_trainer.py",
                old="DistributedType.TPU",
                new="DistributedType.XLA",
                why=_VERSIONS,
            ),
        ),
    ),
    Recipe(
        name="TRL sft",
        project="trl",
        script="trl/scripts/sft.py",
        library="TRL",
        arguments=("--dataset_name", "chats", *_TRL),
    ),
    Recipe(
        name="TRL sft, LoRA, packed",
        project="trl",
        script="trl/scripts/sft.py",
        library="TRL, PEFT",
        arguments=(
            *("--dataset_name", "chats", "--packing", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"),
            *_TRL,
        ),
    ),
    Recipe(
        name="TRL dpo",
        project="trl",
        script="trl/scripts/dpo.py",
        library="TRL",
        arguments=("--dataset_name", "preferences", *_TRL),
    ),
    Recipe(
        name="TRL reward",
        project="trl",
        script="trl/scripts/reward.py",
        library="TRL",
        arguments=("--dataset_name", "preferences", *_TRL),
    ),
    Recipe(
        name="TRL kto",
        project="trl",
        script="trl/scripts/kto.py",
        library="TRL",
        arguments=("--dataset_name", "preferences", *_TRL),
    ),
    Recipe(
        name="PEFT sft",
        project="peft",
        script="examples/sft/train.py",
        library="TRL, PEFT",
        arguments=(
            *("--dataset_name", "chats", "--splits", "train,test", "--dataset_text_field", "content"),
            *("--use_peft_lora", "True", "--lora_target_modules", "q_proj,v_proj", *_TRL),
        ),
    ),
    Recipe(
        name="PEFT olora_finetuning",
        project="peft",
        script="examples/olora_finetuning/olora_finetuning.py",
        library="HF Trainer, PEFT",
        arguments=(
            *("--base_model", "tiny-llama", "--data_path", "instructions", "--output_dir", "{out}"),
            *("--batch_size", "4", "--cutoff_len", "64", "--device_map", "cpu", "--dtype", "float32"),
            *("--seed", "0"),
        ),
    ),
    Recipe(
        name="alpaca train.py",
        project="alpaca",
        script="train.py",
        library="HF Trainer",
        arguments=(*(*_LLAMA, "--data_path", "alpaca.json", *_BATCH, "--model_max_length", "256", *_TRAINER, *_SAVES),),
        edits=(
            Edit(
                file="train.py",
                old="tokenizer=tokenizer, args=",
                new="processing_class=tokenizer, args=",
                why=_VERSIONS,
            ),
            Edit(
                file="utils.py",
                old="import openai\n",
                new="",
                why=_OPENAI,
            ),
            Edit(file="utils.py", old="from openai import openai_object\n", new="", why=_OPENAI),
            Edit(file="utils.py", old="openai_object.OpenAIObject", new="dict", why=_OPENAI),
        ),
    ),
    Recipe(
        name="accelerate nlp_example",
        project="accelerate",
        script="examples/nlp_example.py",
        library="accelerate",
        arguments=("--cpu",),
    ),
    Recipe(
        name="accelerate complete_nlp_example",
        project="accelerate",
        script="examples/complete_nlp_example.py",
        library="accelerate",
        arguments=("--cpu", "--output_dir", "{out}"),
    ),
    Recipe(
        name="DeepSpeedExamples cifar",
        project="deepspeed-examples",
        script="training/cifar/cifar10_deepspeed.py",
        library="DeepSpeed",
        arguments=("--epochs", "1", "--dtype", "bf16"),
        is_seeded=False,
        edits=(
            Edit(
                file="training/cifar/cifar10_deepspeed.py",
                old='torchvision.datasets.CIFAR10(\n        root="./data", train=True, download=True, '
                "transform=transform\n",
                new="torchvision.datasets.FakeData(\n        192, (3, 32, 32), 10, transform=transform\n",
                why="downloads CIFAR-10",
                lines=2,
            ),
            Edit(
                file="training/cifar/cifar10_deepspeed.py",
                old='torchvision.datasets.CIFAR10(\n        root="./data", train=False, download=True, '
                "transform=transform\n",
                new="torchvision.datasets.FakeData(\n        192, (3, 32, 32), 10, transform=transform\n",
                why="downloads CIFAR-10",
                lines=2,
            ),
        ),
    ),
    Recipe(
        name="DeepSpeedExamples HelloDeepSpeed",
        project="deepspeed-examples",
        script="training/HelloDeepSpeed/train_bert_ds.py",
        library="DeepSpeed",
        arguments=(
            *("--checkpoint_dir", "{out}", "--num_iterations", "13", "--checkpoint_every", "5", "--log_every", "1"),
            *("--num_layers", "2", "--num_heads", "2", "--ff_dim", "128", "--h_dim", "64"),
            *("--max_seq_length", "64", "--batch_size", "2"),
        ),
    ),
    Recipe(
        name="pytorch/examples FSDP2",
        project="pytorch-examples",
        script=f"{_DISTRIBUTED}/FSDP2/example.py",
        library="fully_shard",
        inside=True,
        edits=(
            _any_machine(f"{_DISTRIBUTED}/FSDP2/example.py"),
            Edit(
                file=f"{_DISTRIBUTED}/FSDP2/example.py",
                old="backend=backend, device_id=device",
                new="backend=backend",
                why=_NEEDS_CUDA,
            ),
        ),
    ),
    Recipe(
        name="pytorch/examples tensor_parallel",
        project="pytorch-examples",
        script=f"{_DISTRIBUTED}/tensor_parallelism/tensor_parallel_example.py",
        library="torch",
        inside=True,
        is_seeded=False,
        edits=(
            _any_machine(f"{_DISTRIBUTED}/tensor_parallelism/log_utils.py"),
            Edit(
                file=f"{_DISTRIBUTED}/tensor_parallelism/tensor_parallel_example.py",
                old="device_type = torch.accelerator.current_accelerator().type",
                new='device_type = "cpu"',
                why=_NEEDS_CUDA,
            ),
        ),
    ),
    Recipe(
        name="pytorch/examples multigpu_torchrun",
        project="pytorch-examples",
        script=f"{_DISTRIBUTED}/ddp-tutorial-series/multigpu_torchrun.py",
        library="DDP",
        arguments=("2", "1"),
        is_seeded=False,
        inside=True,
        edits=tuple(
            Edit(
                file=f"{_DISTRIBUTED}/ddp-tutorial-series/multigpu_torchrun.py",
                old=old,
                new=new,
                why=_NEEDS_CUDA,
                lines=lines,
            )
            for old, new, lines in (
                ('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', "", 1),
                ('backend="nccl"', 'backend="gloo"', 1),
                (".to(self.gpu_id)", '.to("cpu")', 3),
                ('f"cuda:{self.gpu_id}"', '"cpu"', 1),
                (", device_ids=[self.gpu_id]", "", 1),
            )
        ),
    ),
    Recipe(
        name="pytorch/examples minGPT-ddp",
        project="pytorch-examples",
        script=f"{_DISTRIBUTED}/minGPT-ddp/mingpt/main.py",
        library="DDP",
        arguments=(
            *("data_config.path=data/input.txt", "data_config.truncate=0.002", "data_config.block_size=64"),
            *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=64"),
            *("trainer_config.max_epochs=2", "trainer_config.batch_size=64", "trainer_config.save_every=1"),
            *("trainer_config.use_amp=false", "trainer_config.data_loader_workers=0"),
        ),
        inside=True,
        is_seeded=False,
        edits=(
            _any_machine(f"{_DISTRIBUTED}/minGPT-ddp/mingpt/main.py"),
            *(
                Edit(
                    file=f"{_DISTRIBUTED}/minGPT-ddp/mingpt/{file}",
                    old=old,
                    new=new,
                    why=_NEEDS_CUDA,
                    lines=lines,
                )
                for file, old, new, lines in (
                    ("main.py", 'torch.device(f"{acc}:{rank}")', 'torch.device("cpu")', 1),
                    ("main.py", "    torch.accelerator.set_device_index(rank)\n", "", 1),
                    ("trainer.py", 'torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")', 1),
                    ("trainer.py", ".to(self.local_rank)", '.to("cpu")', 3),
                    ("trainer.py", ", device_ids=[self.local_rank]", "", 1),
                )
            ),
        ),
    ),
    Recipe(
        name="nanoGPT",
        project="nanogpt",
        script="train.py",
        library="DDP",
        arguments=(
            *("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--backend=gloo"),
            *("--dtype=float32", "--out_dir={out}", "--gradient_accumulation_steps=2", "--batch_size=4"),
            *("--block_size=64", "--n_layer=2", "--n_head=2", "--n_embd=64", "--max_iters=12"),
            *("--lr_decay_iters=12", "--warmup_iters=2", "--eval_interval=6", "--eval_iters=2", "--log_interval=1"),
        ),
        inside=True,
        edits=(
            Edit(file="train.py", old="device = f'cuda:{ddp_local_rank}'", new="device = 'cpu'", why=_NEEDS_CUDA),
            Edit(file="train.py", old="    torch.cuda.set_device(device)\n", new="", why=_NEEDS_CUDA),
            Edit(file="train.py", old=", device_ids=[ddp_local_rank]", new="", why=_NEEDS_CUDA),
        ),
    ),
    Recipe(
        name="nanochat base_train",
        project="nanochat",
        script="scripts/base_train.py",
        library="torch",
        arguments=(
            *("--depth=2", "--aspect-ratio=32", "--head-dim=32", "--window-pattern=L", "--max-seq-len=64"),
            *("--device-batch-size=2", "--total-batch-size=128", "--num-iterations=12", "--eval-every=-1"),
            *("--eval-tokens=128", "--core-metric-every=-1", "--sample-every=-1"),
        ),
        edits=(
            Edit(
                file="scripts/base_train.py",
                old="import wandb\n",
                new="",
                why="imports the client of a service that it does not log to",
            ),
        ),
        ranks=1,
        variables={"NANOCHAT_BASE_DIR": "{data}/nanochat", "PYTHONPATH": "{project}", "TORCHDYNAMO_DISABLE": "1"},
    ),
    Recipe(
        name="Lightning transformer",
        project="lightning",
        script="examples/pytorch/basics/transformer.py",
        library="Lightning",
    ),
    Recipe(
        name="Lightning Fabric language_model",
        project="lightning",
        script="examples/fabric/language_model/train.py",
        library="Lightning Fabric",
        edits=(
            Edit(
                file="examples/fabric/language_model/train.py",
                old="clip_val=0.25",
                new="max_norm=0.25",
                why="clips each gradient by value, where dsplan clips by their norm",
            ),
        ),
    ),
)
