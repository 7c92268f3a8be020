"""Acts: one engine over DDP, FSDP2 and DeepSpeed, its data, and the launching of ranks."""
