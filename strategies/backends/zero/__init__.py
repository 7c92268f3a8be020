"""Our own ZeRO (Rajbhandari et al. 2020), on `torch.distributed` alone; `docs/zero.md` walks through these files."""
