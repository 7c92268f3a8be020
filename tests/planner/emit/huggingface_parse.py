"""Reads [arguments, ...] from stdin, makes TrainingArguments of each and prints what they then hold."""

import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field

from transformers import TrainingArguments

warnings.simplefilter("error", FutureWarning)
# Every transformers 5 takes the old name, 5.23 the new one too.
warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)


@dataclass
class RecomputingArguments(TrainingArguments):  # type: ignore[misc]
    """Recomputes unless it is told not to, as TRL's do."""

    gradient_checkpointing: bool = field(default=True)


def understood(arguments: dict[str, object]) -> dict[str, object]:
    before = dict(os.environ)
    training_arguments = RecomputingArguments(**arguments, output_dir=tempfile.gettempdir())
    plugin = training_arguments.deepspeed_plugin
    answer = {
        "micro_batch": training_arguments.per_device_train_batch_size,
        "accumulation": training_arguments.gradient_accumulation_steps,
        "precision": "bf16" if training_arguments.bf16 else "fp16" if training_arguments.fp16 else "no",
        "optimizer": training_arguments.optim.value
        if hasattr(training_arguments.optim, "value")
        else training_arguments.optim,
        "checkpointing": training_arguments.activation_checkpointing,
        "fsdp": training_arguments.fsdp_plugin_args if training_arguments.fsdp else None,
        "stage": plugin.zero_stage if plugin else 0,
        "devices": [plugin.offload_optimizer_device, plugin.offload_param_device] if plugin else None,
        "mismatches": plugin.hf_ds_config.mismatches if plugin else [],
        "device": training_arguments.device.type,
    }
    os.environ.clear()
    os.environ.update(before)
    return answer


print(json.dumps([understood(arguments) for arguments in json.load(sys.stdin)]))
