"""How scripts that use HF Trainer, accelerate or DeepSpeed get their plan: hooks installed before the script runs."""
