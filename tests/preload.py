"""The modules that processes of tests are forked with, for each would import them in seconds of processor time."""

PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "strategies.engine.initialize",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
)  # fmt: skip
