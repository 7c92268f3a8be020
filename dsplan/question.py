"""A person's question and goal, under the names of the command line's flags, on their way to the planner."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from hardware_db.units import parse_count
from planner import limits
from planner import vocabulary as words
from planner.cluster.budget import Budget
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.models.catalogue import taken_for
from planner.models.facts import ModelFacts
from planner.models.resolve import config_file, is_factory, resolve_model
from planner.question_defaults import PLANS_SHOWN
from planner.search.post_training import require_group, training_cluster
from planner.search.recall import recall
from planner.search.request import Request, WorkOptions, make_request, usual_global_batch
from planner.types.plan import Plan

if TYPE_CHECKING:
    from planner.search.exact import ExactOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(WorkOptions):
    """Model, hardware and work; a field is named as its flag (`gpus` is `--gpus`) and None if the person did not say.

    `model` is a catalogue name, a Hub id, the path of a `config.json` or `package.module:factory`; `model_size` a size
    such as `6.7B` in its place. Without any hardware the machine is probed. GB are 1e9 bytes.
    """

    model: str | None = None
    model_size: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    node_type: str | None = None
    interconnect: str | None = None
    cluster: str | Path | None = None

    def request(
        self,
        facts: ModelFacts | None = None,
        *,
        degrees: tuple[int, int, int, bool] = (1, 1, 1, False),
        of_file: bool = False,
        **ranking: Any,
    ) -> Request:
        """Return the planner's request.

        `ranking` are its fields that say how plans are ranked, `facts` those of the model where they are known already,
        `degrees` over how many ranks a plan is to split layers, tokens and experts, and whether it splits sequences
        between those that share layers. `of_file` says that the generations are those of a trainer's own config, whose
        method may need one completion a prompt alone, as verl's REINFORCE++ does.

        Raises:
            DsplanError: the model, the hardware or a number is not one that can be planned with.
        """
        if not of_file:
            require_group(self.task, self.generations)
        own_model = None
        if facts is None and self.model is not None and is_factory(self.model):
            from dsplan.exact.factory import model_and_product

            facts, own_model = model_and_product(self.model, model_size=self.model_size)
        elif facts is None:
            facts = resolve_model(self.model, model_size=self.model_size)
        cluster = training_cluster(resolve_cluster(self._hardware()), self)
        if own_model is None or own_model.batch is None:
            request = make_request(facts, cluster, self, **ranking)
            return recall(replace(request, defaults=(*self._remarks_on_name(), *request.defaults)))
        from strategies.tracing.module_trace import traced_request, work_of

        task, length = work_of(facts, own_model.model, own_model.batch, self.seq_len)
        work = replace(self, task=self.task or task, seq_len=length)
        request = make_request(facts, cluster, work, **ranking)
        return recall(traced_request(request, own_model.model, own_model.batch, degrees))

    def requests(self, facts: ModelFacts | None = None, **ranking: Any) -> tuple[Request, ...]:
        """Return the planner's request, or one for every place that completions may be generated in.

        Raises:
            DsplanError: as `request`.
        """
        if self.task not in words.GENERATING or self.rollout == "hf" or (self.model and is_factory(self.model)):
            return (self.request(facts, **ranking),)
        from planner.search.rollouts import is_open, ways, without_idle_shares

        facts = facts or resolve_model(self.model, model_size=self.model_size)
        cluster = resolve_cluster(self._hardware())
        if not is_open(self, self.task, cluster):
            return (self.request(facts, **ranking),)
        # However many GPUs train, a step is of as many samples: places are compared by its seconds.
        batch, *taken = (self.global_batch,) if self.global_batch else usual_global_batch(cluster, self, self.task)
        possible, problem = [], None
        for options in ways(replace(self, global_batch=batch), cluster, facts):
            try:
                request = options.request(facts, **ranking)
                possible.append(replace(request, defaults=(*request.defaults, *taken)))
            except ContradictoryRequest as error:  # of GPUs that are left to train
                problem = problem or error
        if problem is not None and not possible:
            raise problem
        return without_idle_shares(possible)

    def _hardware(self) -> HardwareRequest:
        return HardwareRequest(
            gpus=self.gpus,
            gpu=self.gpu,
            nodes=self.nodes,
            node_type=self.node_type,
            interconnect=self.interconnect,
            cluster_file=None if self.cluster is None else str(self.cluster),
            memory_gb=self.max_memory_gb,
        )

    def _remarks_on_name(self) -> list[str]:
        """Return which model a name is taken for that only resembles its own."""
        if self.model is None or config_file(self.model) is not None or (other := taken_for(self.model)) is None:
            return []
        return [f"{self.model} is taken for {other}, whose name it has behind another organisation (--model)"]


# From a question about one configuration to its plan, by closed forms or by a trace.


def estimate_question(
    question: Question, options: ExactOptions, report: Callable[[str], None] | None = None
) -> tuple[Request, Plan]:
    """Return the plan, and the request with what was taken for granted.

    With `report` the memory is traced, and told of it.

    Raises:
        DsplanError: the model, the hardware, a number or the configuration is not possible, or torch is missing.
    """
    from planner.search.exact import exact

    if report is None:
        from planner.search.estimate import estimate

        request, configuration = exact(question.request(degrees=_degrees(options)), options)
        return request, estimate(request, configuration)
    from dsplan.exact.ask import Tracing
    from dsplan.exact.cache import TraceCache
    from dsplan.exact.estimate import traced_estimate
    from dsplan.exact.source import model_source

    cache = TraceCache()
    source = model_source(question.model, question.model_size, cache)
    task, length = source.work
    completed = replace(question, task=question.task or task, seq_len=question.seq_len or length)
    request, configuration = exact(completed.request(facts=source.facts), options)
    is_own = source.facts.kind == "custom"
    without = partial(completed.request, degrees=_degrees(options)) if is_own else None
    return request, traced_estimate(request, configuration, source, Tracing(cache=cache, report=report), without)


def _degrees(options: ExactOptions) -> tuple[int, int, int, bool]:
    return options.tp, options.cp, options.ep, options.tp > 1 and bool(options.sequence_parallel)


# How the plans that answer it are ranked, and which are shown.


_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Ranking of plans and limits on them; a field is named as its flag.

    `price` is dollars per GPU-hour, `tokens` those of the whole training, as a number or such as 300B, `deadline` the
    time for them, such as 36h, 14d or 2w. `backend` runs ZeRO, None leaves it to what the device
    has; with `offload` only plans count that offload so, with `shard` those where so many ranks share one set of
    states.
    """

    objective: words.Objective = "throughput"
    top: int = PLANS_SHOWN
    fastest: bool = False
    price: float | None = None
    tokens: str | float | None = None
    deadline: str | None = None
    pareto: bool = False
    backend: words.Backend | None = None
    offload: words.Offload | None = None
    shard: int | None = None
    all_plans: bool = False

    def ranking(self) -> dict[str, Any]:
        """Return the fields of the planner's request that say the same.

        Raises:
            ContradictoryRequest: tokens or deadline are not what they should be, there is a deadline for no tokens, or
                one rank is to share states.
        """
        limits.GPUS.check("--shard", self.shard)
        if self.shard == 1:
            raise ContradictoryRequest("--shard 1 shares no states; leave it out, and ddp is among the plans")
        return {
            "objective": self.objective,
            "top": self.top,
            "allow_unrunnable": self.all_plans,
            "simplest_first": not self.fastest,
            "budget": self._budget(),
            "zero_backend": self.backend,
            "offload": self.offload,
            "shard": self.shard,
        }

    def _budget(self) -> Budget:
        if self.deadline is not None and self.tokens is None:
            raise ContradictoryRequest(f"--deadline {self.deadline} needs the tokens of the training: --tokens 300B")
        limits.USD_PER_HOUR.check("--price", self.price)
        limits.PLANS.check("--top", self.top)
        return Budget(
            usd_per_gpu_hour=self.price,
            tokens=None if self.tokens is None else _tokens(self.tokens),
            deadline_days=None if self.deadline is None else _days(self.deadline),
        )


def _tokens(given: str | float) -> float:
    try:
        tokens = parse_count(given) if isinstance(given, str) else given
    except DsplanError:
        tokens = 0
    if not limits.TRAINING_TOKENS.allows(tokens):
        raise ContradictoryRequest(f"--tokens {quote(given)} is not a number of tokens; write 20M, 300B or 1.5T")
    return float(tokens)


def _days(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([hdw])\s*", text)
    days = float(match[1]) * _DAYS[match[2]] if match else 0.0
    if not limits.DAYS.allows(days):
        raise ContradictoryRequest(
            f"--deadline {quote(text)} is not a length of time; write hours, days or weeks: 36h, 14d, 2w"
        )
    return days
