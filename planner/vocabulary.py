"""The words that plans are made of, as the command line, the JSON and the engine spell them."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["single", "ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero1", "zero2", "zero3"]
Backend = Literal["torch", "deepspeed", "native"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-pure", "fp8", "fp4"]
Fp8Recipe = Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
Optimizer = Literal[
    "adamw",
    "adamw-fused",
    "adamw-forloop",
    "adamw-8bit",
    "adamw-8bit-paged",
    "adamw-4bit",
    "adamw-fp8",
    "sgd",
    "adafactor",
    "lion",
    "muon",
]
JobKind = Literal["TrainJob", "PyTorchJob", "JobSet"]
"""Training jobs of a Kubernetes cluster: Kubeflow's, and what its TrainJob is made of."""
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)
Loss = Literal["plain", "chunked", "fused", "tiled"]
Method = Literal["full", "lora", "qlora", "dora"]
LoadDtype = Literal["fp32", "bf16", "fp16", "int8", "nf4"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Attention = Literal["sdpa", "eager", "flash"]
Checkpointing = Literal["none", "full", "selective"]
Compression = Literal["none", "fp16", "bf16", "int8"]
Offload = Literal["none", "optimizer", "all", "nvme"]
Task = Literal[
    "causal-lm",
    "masked-lm",
    "seq-cls",
    "seq2seq",
    "image-cls",
    "diffusion",
    "custom",
    "sft",
    "dpo",
    "kto",
    "orpo",
    "reward",
    "grpo",
    "ppo",
]
Rollout = Literal["hf", "colocate", "server"]
"""Where completions are generated: by the model that is trained, by an engine on its GPUs, or on GPUs of their own."""
Save = Literal["none", "sharded", "full"]
Degree = Literal["tp", "pp", "cp", "ep"]
"""Over how many ranks the work on one sample is split: layers, the stack of layers, the sequence, routed experts."""
Objective = Literal["throughput", "memory", "cost"]
Verdict = Literal["fits", "tight", "does_not_fit"]
Provenance = Literal["measured", "traced", "calibrated", "datasheet"]

GROUP_BACKENDS = "cpu:gloo,cuda:nccl"
"""What carries the tensors of a process group of GPUs, where some of them are on the CPU."""
DEGREES: tuple[Degree, ...] = get_args(Degree)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
BACKENDS: tuple[Backend, ...] = get_args(Backend)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FP8_RECIPES: tuple[Fp8Recipe, ...] = get_args(Fp8Recipe)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts", "mlp", "moe")
"""Parts of a block that Megatron-Core's selective recomputation takes one by one (`recompute_modules`,
NVIDIA/Megatron-LM@d98e8a64 megatron/core/transformer/transformer_config.py line 560)."""
DEFAULT_RECOMPUTED = ("core_attn",)
"""What it drops unless told otherwise (the same file, line 1941)."""
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
TASKS: tuple[Task, ...] = get_args(Task)
CLASSIFYING: tuple[Task, ...] = ("seq-cls", "image-cls", "reward")
"""Tasks whose head reads one position of a sample."""
PAIRED: tuple[Task, ...] = ("dpo", "orpo", "reward")
"""Tasks whose samples are pairs of sequences: a chosen and a rejected one."""
POST_TRAINING: tuple[Task, ...] = ("sft", "dpo", "kto", "orpo", "reward", "grpo", "ppo")
"""Tasks of post-training, whose samples are a prompt and a completion."""
REFERRING: tuple[Task, ...] = ("dpo", "kto")
"""Tasks of which every micro-batch is run through a reference model too."""
GENERATING: tuple[Task, ...] = ("grpo", "ppo")
"""Tasks that train on completions which the model itself has generated."""
SCORING: tuple[Task, ...] = ("causal-lm", "masked-lm", "seq2seq", "sft", "dpo", "kto", "orpo", "grpo", "ppo")
"""Tasks whose head is over the vocabulary."""
DECODING: tuple[Task, ...] = ("causal-lm", *POST_TRAINING)
"""Tasks that run a decoder over whole sequences."""
LOSSES: tuple[Loss, ...] = get_args(Loss)
METHODS: tuple[Method, ...] = get_args(Method)
LOAD_DTYPES: tuple[LoadDtype, ...] = get_args(LoadDtype)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SAVES: tuple[Save, ...] = get_args(Save)
ROLLOUTS: tuple[Rollout, ...] = get_args(Rollout)

REPLICAS: frozenset[str] = frozenset({"single", "ddp"})
"""Strategies whose ranks each have all of the model's states."""
ZERO_STAGES: dict[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
MIXED_PRECISIONS: frozenset[str] = frozenset({"bf16", "fp16", "fp8", "fp4"})
"""Precisions that compute in narrower types than their master weights; fp8 and fp4 are bf16 but for their products."""
SCALED_PRECISIONS: frozenset[str] = frozenset({"fp8", "fp4"})
"""Precisions whose linear layers multiply 8-bit or 4-bit operands, each with the scales of one recipe."""

UNSHARDED: frozenset[str] = frozenset({"single", "ddp"})
"""Strategies under which every rank has all of its weights and states."""
FSDP_STRATEGIES: frozenset[str] = frozenset({"fsdp", "fsdp-grad-op", "hsdp"})


def backends_of(strategy: str) -> tuple[Backend, ...]:
    """Return the backends that can run a strategy."""
    return ("deepspeed", "native") if strategy in ZERO_STAGES else ("torch",)


def default_backend(strategy: str, *, zero: Backend = "deepspeed") -> Backend:
    """Return the backend that runs a strategy unless another is named: `zero` for ZeRO, torch for the rest."""
    return zero if strategy in ZERO_STAGES else "torch"
