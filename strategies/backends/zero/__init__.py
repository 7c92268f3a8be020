"""Our own ZeRO (Rajbhandari et al. 2020), on `torch.distributed` alone. `docs/explanation/zero.md` has the map."""
