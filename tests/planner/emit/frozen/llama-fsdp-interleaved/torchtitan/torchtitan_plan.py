"""fsdp on 64 ranks, for torchtitan after 0.2.2."""

from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def plan() -> Trainer.Config:
    converters = None
    model_spec = model_registry("70B", converters=converters)
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))
    optimizer = default_adamw(lr=5e-05, weight_decay=0.0)
    optimizer.implementation = "foreach"
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./assets/hf/Meta-Llama-3-70B",
        loss=loss,
        optimizer=optimizer,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4096,
            num_tokens_per_train_step=262144,
            max_context_length=2048,
            max_norm=1.0,
            enable_cpu_offload=False,
            dtype="float32",
            mixed_precision_param="bfloat16",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=4,
            fsdp_reshard_after_forward="never",
            tensor_parallel_degree=4,
            context_parallel_degree=1,
            expert_parallel_degree=1,
            pipeline_parallel_degree=4,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            pipeline_parallel_schedule="Interleaved1F1B",
            pipeline_parallel_layers_per_stage=4,
            enable_sequence_parallel=False,
            num_pp_microbatches=16,
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=False),
        dataloader=GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"])),
    )
