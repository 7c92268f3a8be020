"""Names the code base whose modules a published row ran: by its documentation, not by its error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

UNPADDED = Path(__file__).with_name("vtrain.yaml")
"""vTrain's code on one tensor-parallel rank, whose vocabulary no multiple of anything was asked for."""

# Runs that name transformers are of 2021.
NAMED: Mapping[str, str] = {"transformers": "transformers-2021", "megatron": "megatron-deepspeed"}
BY_SOURCE: Mapping[str, str] = {
    "llmfoundry_2023": "llm-foundry-2023",
    "llmfoundry": "llm-foundry",
    "internevo": "internevo",
    "bigscience": "megatron-deepspeed",
    "vtrain": "megatron-deepspeed",
    "alpa": "alpa",
    "nemo": "nemo",
    "dgxc": "nemo",
    "torch": "torchtitan",
}


def code_of(row: Mapping[str, str]) -> str:
    """The code base that a row names, or that its source is known for."""
    if row["source"].startswith("vtrain") and row["tp"] == "1":
        return str(UNPADDED)
    if row["code"]:
        return NAMED[row["code"]]
    return next((code for name, code in BY_SOURCE.items() if row["source"].startswith(name)), "transformers")


def is_compiled(row: Mapping[str, str]) -> bool:
    """Return whether its blocks were under torch.compile."""
    return row.get("compiled") == "y"
