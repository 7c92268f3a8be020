"""Gives torch an emulated `cuda` device in every Python process whose EMULATED_CUDA names a machine's file."""

import os
import sys

if os.environ.get("EMULATED_CUDA") or os.environ.get("CUDA_LINES"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if os.environ.get("CUDA_LINES"):
    import lines

    lines.install(os.environ["CUDA_LINES"])
if os.environ.get("EMULATED_CUDA"):
    import cuda_of_torch
    import emulated_nvml

    emulated_nvml.install()
    cuda_of_torch.install()
