"""Reads [{filename: text}, ...] from stdin and prints what accelerate's loader, launcher and plugins make of each."""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import DeepSpeedPlugin
from accelerate.utils.launch import prepare_multi_gpu_env


def understood(files: dict[str, str]) -> dict[str, object]:
    directory = Path(tempfile.mkdtemp())
    for name, text in files.items():
        (directory / name).write_text(text)
    os.chdir(directory)
    config = load_config_from_file("accelerate.yaml")
    arguments = ["--config_file", "accelerate.yaml", "train.py"]
    if config.num_machines > 1:
        with socket.socket() as free:  # accelerate looks whether this machine has the port to give
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        arguments[:0] = ["--main_process_ip", "10.0.0.1", "--main_process_port", port]
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    return {
        "type": config.distributed_type.value,
        "machines": launch.num_machines,
        "processes": launch.num_processes,
        "mixed_precision": launch.mixed_precision,
        "fp8": config.fp8_config["backend"] if config.fp8_config else None,
        "fsdp": fsdp(launch) if launch.use_fsdp else None,
        "zero": zero(config.deepspeed_config) if launch.use_deepspeed else None,
    }


def fsdp(launch: object) -> dict[str, object]:
    if launch.mixed_precision == "fp8":
        launch.mixed_precision = "bf16"  # torchao is looked for otherwise, and is not installed here
    environment = prepare_multi_gpu_env(launch)
    before = dict(os.environ)
    os.environ.update({key: value for key, value in environment.items() if key.startswith(("FSDP_", "PARALLELISM_"))})
    plugin = FullyShardedDataParallelPlugin()
    mesh = ParallelismConfig() if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true" else None
    os.environ.clear()
    os.environ.update(before)
    return {
        "version": plugin.fsdp_version,
        "reshard": plugin.reshard_after_forward,
        "offload": type(plugin.cpu_offload).__name__,
        "checkpointing": plugin.activation_checkpointing,
        "blocks": plugin.transformer_cls_names_to_wrap,
        "state_dict": plugin.state_dict_type.name,
        "mesh": mesh and [mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size, mesh.cp_size],
    }


def zero(section: dict[str, object]) -> dict[str, object]:
    plugin = DeepSpeedPlugin(hf_ds_config=section["deepspeed_config_file"], zero3_init_flag=section["zero3_init_flag"])
    return {
        "stage": plugin.zero_stage,
        "accumulation": plugin.gradient_accumulation_steps,
        "init": plugin.zero3_init_flag,
        "devices": [plugin.offload_optimizer_device, plugin.offload_param_device],
    }


print(json.dumps([understood(files) for files in json.load(sys.stdin)]))
