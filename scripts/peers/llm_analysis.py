"""Asks llm-analysis about cases, in an interpreter that has it: a list of cases as JSON in, one answer each out.

A case may name the GPU and the share of its peak that llm-analysis is to take; the answer has bytes and seconds.

    echo '[{"model": {...}, "dtype": {...}, "parallelism": {...}, "training": {...}}]' | python -I llm_analysis.py

llm-analysis needs a transformers older than dsplan's, so `peers.py` runs this file with another interpreter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from typing import Any

ANSWER = "(weight+op_state+grad+act)_memory_per_gpu"
SECONDS = "latency_per_iter"
ROOMY_GB = 1_000_000
"""It says nothing of what does not fit by its own count, so it is given a card on which everything does."""


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes per GPU and seconds per step, or why there are none."""
    analysis, config = import_module("llm_analysis.analysis"), import_module("llm_analysis.config")
    training = case["training"]
    training["activation_recomputation"] = analysis.ActivationRecomputation(training["activation_recomputation"])
    training["ds_zero"] = analysis.DSZeRO(training["ds_zero"])
    try:
        model = analysis.LLMAnalysis(
            config.ModelConfig(**case["model"]),
            replace(config.get_gpu_config_by_name(case.get("gpu", "a100-sxm-80gb")), mem_per_GPU_in_GB=ROOMY_GB),
            config.DtypeConfig(**case["dtype"]),
            config.ParallelismConfig(**case["parallelism"]),
            flops_efficiency=case.get("efficiency", 0.5),
        )
        figures = model.training(**training)
        return {"bytes": round(figures[ANSWER]), "seconds": figures[SECONDS]}
    except (AssertionError, ZeroDivisionError) as error:
        return {"reason": f"refuses: {str(error).splitlines()[0] if str(error) else 'an assertion fails'}"}


def main() -> None:
    """Answer the cases on standard input as JSON."""
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(case) for case in json.load(sys.stdin)]
    json.dump({"version": version("llm-analysis"), "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
