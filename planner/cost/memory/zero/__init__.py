"""What ZeRO holds, in DeepSpeed's implementation and in ours."""
