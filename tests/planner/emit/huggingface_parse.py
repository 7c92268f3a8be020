"""Reads [arguments, ...] from stdin, makes TrainingArguments of each and prints what they then hold."""

import json
import os
import sys
import tempfile
import warnings

from transformers import TrainingArguments

warnings.simplefilter("error", FutureWarning)
# Every transformers 5 takes the old name, 5.23 the new one too.
warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)


def understood(arguments: dict[str, object]) -> dict[str, object]:
    before = dict(os.environ)
    made = TrainingArguments(**arguments, output_dir=tempfile.gettempdir())
    plugin = made.deepspeed_plugin
    answer = {
        "micro_batch": made.per_device_train_batch_size,
        "accumulation": made.gradient_accumulation_steps,
        "precision": "bf16" if made.bf16 else "fp16" if made.fp16 else "no",
        "optimizer": made.optim.value if hasattr(made.optim, "value") else made.optim,
        "checkpointing": made.activation_checkpointing,
        "fsdp": made.fsdp_plugin_args if made.fsdp else None,
        "stage": plugin.zero_stage if plugin else 0,
        "devices": [plugin.offload_optimizer_device, plugin.offload_param_device] if plugin else None,
        "mismatches": plugin.hf_ds_config.mismatches if plugin else [],
        "device": made.device.type,
    }
    os.environ.clear()
    os.environ.update(before)
    return answer


print(json.dumps([understood(arguments) for arguments in json.load(sys.stdin)]))
