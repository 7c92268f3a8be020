"""Question: what a person asks, in the words of the command line, on its way to the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import vocabulary as words
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.facts import ModelFacts
from planner.search.exact import ExactOptions, exact
from planner.search.recall import recalled
from planner.search.request import Request, WorkOptions, make_request
from planner.types.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Model, hardware and work; a field is named as its flag (`gpus` is `--gpus`) and None if the person did not say.

    `model` is a catalogue name, a Hub id, the path of a `config.json` or `package.module:factory`; `model_size` a size
    such as `6.7B` in its place. Without any hardware the machine is probed. GB are 1e9 bytes.
    """

    model: str | None = None
    model_size: str | None = None
    task: words.Task | None = None
    gpus: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    node_type: str | None = None
    cluster: str | Path | None = None
    seq_len: int | None = None
    source_len: int | None = None
    global_batch: int | None = None
    precision: words.Precision | None = None
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    max_memory_gb: float | None = None
    host_memory_gb: float | None = None
    eval_batch: int | None = None
    eval_keep: int | None = None
    save: words.Save = "none"

    def request(self, facts: ModelFacts | None = None, **ranking: Any) -> Request:
        """The planner's request; `ranking` are its fields that say how plans are ranked, `facts` those of the model
        where they are known already.

        Raises:
            DsplanError: the model, the hardware or a number is not one that can be planned with.
        """
        from strategies.tracing.factory import any_model

        facts = facts or any_model(self.model, model_size=self.model_size)
        hardware = HardwareRequest(
            gpus=self.gpus,
            gpu=self.gpu,
            nodes=self.nodes,
            node_type=self.node_type,
            cluster_file=None if self.cluster is None else str(self.cluster),
            memory_gb=self.max_memory_gb,
        )
        work = WorkOptions(
            task=self.task,
            seq_len=self.seq_len,
            source_len=self.source_len,
            global_batch=self.global_batch,
            precision=self.precision,
            optimizer=self.optimizer,
            attention=self.attention,
            max_memory_gb=self.max_memory_gb,
            host_memory_gb=self.host_memory_gb,
            eval_batch=self.eval_batch,
            eval_keep=self.eval_keep,
            save=self.save,
        )
        return recalled(make_request(facts, resolve_cluster(hardware), work, **ranking))


# From a question about one configuration to its plan, by closed forms or by a trace.


def estimated(
    question: Question, options: ExactOptions, report: Callable[[str], None] | None = None
) -> tuple[Request, Plan]:
    """The plan, and the request with what was taken for granted; with `report` the memory is traced, and told of it.

    Raises:
        DsplanError: the model, the hardware, a number or the configuration is not possible, or torch is missing.
    """
    if report is None:
        from planner.search.estimate import estimate

        request, configuration = exact(question.request(), options)
        return request, estimate(request, configuration)
    from strategies.tracing.cache.ask import Tracing
    from strategies.tracing.cache.cache import TraceCache
    from strategies.tracing.cache.estimate import traced_estimate
    from strategies.tracing.cache.source import model_source

    cache = TraceCache()
    source = model_source(question.model, question.model_size, cache)
    request, configuration = exact(question.request(facts=source.facts), options)
    return request, traced_estimate(request, configuration, source, Tracing(cache=cache, report=report))
