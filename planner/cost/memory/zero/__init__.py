"""Memory of ZeRO, in DeepSpeed's implementation and in ours."""
