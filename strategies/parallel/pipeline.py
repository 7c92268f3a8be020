"""Schedules of a pipeline: in which order each rank works, what it sends when, and the run of it.

A schedule is a list of actions for every rank, which is simulated before a rank runs it. Orders with several stages on
a rank are those of `torch.distributed.pipelining`, and so is a backward pass in two parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.types.plan import Configuration
from planner.vocabulary import Schedule
from strategies.errors import CannotRun
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import Arguments
from strategies.parallel.stages import Travel, stages_of
from strategies.torch_compat.autograd import backward_of_input, backward_of_weights, pass_of

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
]
_OF_TORCH: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
_PARTNER: dict[Kind, Kind] = {"send_forward": "receive_forward", "send_backward": "receive_backward"}


class Action(NamedTuple):
    """Action of a rank for one of its stages and a micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


Order = dict[int, list[Action]]
"""The actions of every rank of the pipeline."""


def order_of(schedule: Schedule, *, ranks: int, virtual_stages: int, micro_batches: int) -> Order:
    """In which order the ranks of a pipeline work, without messages.

    GPipe runs all forward passes first (arXiv 1811.06965); 1F1B is that of Narayanan et al. 2021 (arXiv 2104.04473,
    section 2.2). Interleaved and zero-bubble orders are torch's (`ScheduleInterleaved1F1B`,
    `ScheduleInterleavedZeroBubble`).

    Raises:
        CannotRun: torch has no such order for so many micro-batches.
    """
    if schedule == "gpipe":
        passes: tuple[Kind, ...] = ("forward", "backward")
        return {
            rank: [Action(kind, rank, index) for kind in passes for index in range(micro_batches)]
            for rank in range(ranks)
        }
    if schedule == "1f1b":
        return {rank: _one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)}
    return _torch_order(schedule, ranks, virtual_stages, micro_batches)


def forward_order(stages: Sequence[int], micro_batches: int) -> list[Action]:
    """Return the order of a rank that evaluates: the passes of its first stage, then of the next."""
    return [Action("forward", stage, index) for stage in stages for index in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - rank - 1, micro_batches)
    actions = [Action("forward", rank, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        actions += [Action("forward", rank, ahead + index), Action("backward", rank, index)]
    return actions + [Action("backward", rank, index) for index in range(micro_batches - ahead, micro_batches)]


def _torch_order(schedule: Schedule, ranks: int, virtual_stages: int, micro_batches: int) -> Order:
    from torch.distributed.pipelining import schedules

    kind: Any = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    }[schedule]
    # What torch asks of stages is how many there are, and where.
    stages = [
        SimpleNamespace(
            stage_index=turn * ranks,
            num_stages=ranks * virtual_stages,
            group_size=ranks,
            group_rank=0,
            is_first=turn == 0,
            is_last=False,
            has_backward=True,
            submod=nn.Identity(),
        )
        for turn in range(virtual_stages)
    ]
    try:
        schedule_of_torch = kind(stages, micro_batches, loss_fn=_no_loss)
    except ValueError as problem:
        raise CannotRun(f"schedule {schedule}: {str(problem).splitlines()[0]}") from None
    return {
        rank: [
            Action(_OF_TORCH[pass_of(action)], action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None and pass_of(action) in _OF_TORCH
        ]
        for rank, actions in schedule_of_torch.pipeline_order.items()
    }


def _no_loss(*_: Any) -> torch.Tensor:
    raise NotImplementedError  # torch's own run of the schedule is not used


# Messages, and whether anybody waits for ever.


def with_messages(order: Order, lies_on: Callable[[int], int], stages: int) -> Order:
    """Add what ranks send and receive to an order.

    A message is sent as soon as it is made and received at that place of the receiver's order, so that all ranks see
    all messages in one order and nobody waits for ever, however few of them are on their way at once.

    Raises:
        CannotRun: a rank would wait for ever; the line names it and its action.
    """
    merged: Order = {rank: [] for rank in order}
    left = {rank: deque(actions) for rank, actions in order.items()}
    taken: set[Action] = set()
    while any(left.values()):
        moved = False
        for rank, waiting in left.items():
            if not waiting or not _is_possible(waiting[0], taken, stages):
                continue
            action, moved = waiting.popleft(), True
            taken.add(action)
            merged[rank].append(action)
            message = _message_after(action, stages)
            if message is not None and lies_on(message[1].stage) != rank:
                merged[rank].append(message[0])
                merged[lies_on(message[1].stage)].append(message[1])
        if not moved:
            rank, waiting = next((rank, waiting) for rank, waiting in left.items() if waiting)
            raise CannotRun(f"the schedule never ends: rank {rank} of the pipeline waits for ever for {waiting[0]}")
    return merged


def _is_possible(action: Action, past: set[Action], stages: int) -> bool:
    kind, stage, index = action
    if kind == "forward":
        return stage == 0 or Action("forward", stage - 1, index) in past
    if kind == "backward_weight":
        return Action("backward_input", stage, index) in past
    after = (Action("backward", stage + 1, index), Action("backward_input", stage + 1, index))
    return Action("forward", stage, index) in past and (stage == stages - 1 or any(member in past for member in after))


def _message_after(action: Action, stages: int) -> tuple[Action, Action] | None:
    """Return the sender's and the receiver's action for what an action makes."""
    kind, stage, index = action
    if kind == "forward" and stage < stages - 1:
        return Action("send_forward", stage, index), Action("receive_forward", stage + 1, index)
    if kind in ("backward", "backward_input") and stage > 0:
        return Action("send_backward", stage, index), Action("receive_backward", stage - 1, index)
    return None


def require_end(order: Order, lies_on: Callable[[int], int], stages: int) -> None:
    """Simulate all ranks, each of which waits for a message until its partner is there too.

    Raises:
        CannotRun: they wait for ever, or a pass is missing; the line names a rank and its action.
    """
    left = {rank: deque(actions) for rank, actions in order.items()}
    taken: set[Action] = set()
    while any(left.values()):
        moved = False
        for rank, waiting in left.items():
            while waiting and _can_go(waiting[0], rank, left, taken, lies_on, stages):
                action, moved = waiting.popleft(), True
                taken.add(action)
                if action.kind in _PARTNER:
                    partner = _received(action)
                    left[lies_on(partner.stage)].popleft()
                    taken.add(partner)
        if not moved:
            rank, waiting = next((rank, waiting) for rank, waiting in left.items() if waiting)
            raise CannotRun(f"the schedule never ends: rank {rank} of the pipeline waits for ever at {waiting[0]}")


def _can_go(
    action: Action,
    rank: int,
    left: Mapping[int, deque[Action]],
    taken: set[Action],
    lies_on: Callable[[int], int],
    stages: int,
) -> bool:
    kind, stage, index = action
    if kind in _PARTNER:
        there = left[lies_on(_received(action).stage)]
        return bool(there) and there[0] == _received(action)
    if kind in ("receive_forward", "receive_backward"):
        return False  # goes with its partner
    if not _is_possible(action, taken, stages):
        return False
    if kind == "forward" and stage > 0 and lies_on(stage - 1) != rank:
        return Action("receive_forward", stage, index) in taken
    if kind in ("backward", "backward_input") and stage < stages - 1 and lies_on(stage + 1) != rank:
        return Action("receive_backward", stage, index) in taken
    return True


def _received(action: Action) -> Action:
    step = 1 if action.kind == "send_forward" else -1
    return Action(_PARTNER[action.kind], action.stage + step, action.micro_batch)


# The run of a schedule on one rank.


_ON_THEIR_WAY = 2
"""Messages of a rank that may be on their way at once: one to the next stage and one to the one before it. None would
do too, which is what a schedule is simulated with."""


class Passes(Protocol):
    """Calls by which an engine runs a stage's forward and backward pass."""

    def forward(self, arguments: Arguments, *, is_last: bool) -> torch.Tensor:
        """Return the running stage's hidden states, or the last stage's loss."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as its backward pass begins with it."""

    def backward(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_stage: bool, ends_step: bool
    ) -> None:
        """Add the gradients of a pass; whether it is the last of its stage, and the last of all on this rank."""

    def backward_weights(self, run: Callable[[], None], *, ends_step: bool) -> None:
        """Do the same of a pass that was split: `run` adds the gradients of weights to `.grad`."""


class _StageOutput:
    """A stage's tensor of a micro-batch, of which only where its backward pass begins is kept once it was sent.

    Megatron-LM frees it too: `core/pipeline_parallel/schedules.py`, deallocate_output_tensor.
    """

    __slots__ = ("dtype", "root")

    def __init__(self, output: torch.Tensor) -> None:
        self.root: torch.Tensor | GradientEdge = output
        self.dtype = output.dtype

    @property
    def values(self) -> torch.Tensor:
        assert isinstance(self.root, torch.Tensor)  # it has not been sent yet
        return self.root.detach()

    def is_sent(self) -> None:
        """Keep the graph alone."""
        if isinstance(self.root, torch.Tensor) and self.root.requires_grad:
            self.root = get_gradient_edge(self.root)


@dataclass(kw_only=True, slots=True)
class _State:
    """Tensors on their way through this rank's stages."""

    trains: bool
    given: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """What a stage receives for a micro-batch; its gradient is what the stage sends back."""
    made: dict[tuple[int, int], _StageOutput] = field(default_factory=dict)
    returned: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Gradients of what a stage was given."""
    arriving: dict[Action, Any] = field(default_factory=dict)
    weights: dict[tuple[int, int], Any] = field(default_factory=dict)
    """What a backward pass of inputs alone left for that of weights."""
    sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


class Pipeline:
    """Runs this rank's actions of a plan's schedule."""

    def __init__(self, model: nn.Module, mesh: Mesh, configuration: Configuration) -> None:
        stages = stages_of(model)
        assert stages is not None  # the model was cut
        self.stages, self._mesh, self._plan = stages, mesh, configuration
        self._weights = list(model.parameters())
        self._device = mesh.environment.device
        self._orders: dict[tuple[bool, int], list[Action]] = {}

    def actions(self, micro_batches: int, *, trains: bool) -> list[Action]:
        """Return the rank's actions, which were simulated with all others'.

        Raises:
            CannotRun: the schedule cannot run so many micro-batches.
        """
        key = (trains, micro_batches)
        if key not in self._orders:
            plan, stages = self._plan, self.stages
            if trains:
                order = order_of(
                    plan.pp_schedule, ranks=plan.pp, virtual_stages=plan.virtual_stages, micro_batches=micro_batches
                )
            else:
                everyones: Order = {rank: [] for rank in range(plan.pp)}
                for stage in range(stages.number):
                    everyones[stages.lies_on(stage)] += forward_order([stage], micro_batches)
                order = everyones
            order = with_messages(order, stages.lies_on, stages.number)
            require_end(order, stages.lies_on, stages.number)
            self._orders[key] = order[self._mesh.rank("pp")]
        return self._orders[key]

    def run(self, micro_batches: Sequence[Arguments], passes: Passes, *, trains: bool) -> list[torch.Tensor]:
        """Return the losses of the micro-batches where the last stage is, nothing elsewhere; gradients are added."""
        state, losses = _State(trains=trains), list[torch.Tensor]()
        for arguments in micro_batches:
            self.stages.require(arguments)
        actions = self.actions(len(micro_batches), trains=trains)
        last = _last_of_each(actions)
        for number, action in enumerate(actions):
            arguments = micro_batches[action.micro_batch]
            if action.kind == "forward":
                loss = self._forward(action, arguments, passes, state)
                losses += [] if loss is None else [loss]
            elif action.kind in ("backward", "backward_input", "backward_weight"):
                ends = last.get(action.stage) == number
                self._backward(action, passes, state, ends_stage=ends, ends_step=number == max(last.values()))
            else:
                self._message(action, arguments, state)
        for work, _ in state.sent:
            work.wait()
        return losses

    def _forward(self, action: Action, arguments: Arguments, passes: Passes, state: _State) -> torch.Tensor | None:
        stage, key = action.stage, (action.stage, action.micro_batch)
        received, is_last = None, stage == self.stages.number - 1
        if stage > 0:
            received = self._arrived("receive_forward", key, state)
            if received is None:  # the stage before it is on this rank too
                received = state.made[stage - 1, action.micro_batch].values
                received = received.to(self.stages.received_by(stage).dtype)
            if state.trains:
                state.given[key] = received.requires_grad_()
        with self.stages.running(stage, received):
            output = passes.forward(arguments, is_last=is_last)
        if not state.trains:
            if stage > 0:
                state.made.pop((stage - 1, action.micro_batch), None)
            state.made |= {} if is_last else {key: _StageOutput(output)}
        else:
            state.made[key] = _StageOutput(passes.scaled(output) if is_last else output)
        return output.detach() if is_last else None

    def _backward(self, action: Action, passes: Passes, state: _State, *, ends_stage: bool, ends_step: bool) -> None:
        key, stage = (action.stage, action.micro_batch), action.stage
        if action.kind == "backward_weight":
            left = state.weights.pop(key)
            passes.backward_weights(lambda: _backward_weight(left), ends_step=ends_step)
            return
        output, gradient = state.made.pop(key), None
        if stage < self.stages.number - 1:
            gradient = self._arrived("receive_backward", key, state)
            if gradient is None:
                gradient = state.returned.pop((stage + 1, action.micro_batch))
            gradient = gradient.to(output.dtype)
        given = state.given.pop(key, None)
        if action.kind == "backward_input" and given is not None:
            assert isinstance(output.root, torch.Tensor)
            state.weights[key] = _backward_input(output.root, gradient, given, self._weights)
        else:
            passes.backward(output.root, gradient, ends_stage=ends_stage, ends_step=ends_step)
            if action.kind == "backward_input":
                state.weights[key] = None
        if given is not None:
            assert given.grad is not None
            state.returned[key] = given.grad

    def _message(self, action: Action, arguments: Arguments, state: _State) -> None:
        key = (action.stage, action.micro_batch)
        group = self._mesh.group("pp")
        other = action.stage + (1 if action.kind in ("send_forward", "receive_backward") else -1)
        rank = dist.get_global_rank(group, self.stages.lies_on(other))
        travel = self._travel(action)
        if action.kind in ("receive_forward", "receive_backward"):
            room = torch.empty(travel.shape(arguments), dtype=travel.dtype, device=self._device)
            state.arriving[action] = dist.irecv(room, rank, group=group), room
            return
        if action.kind == "send_backward":
            message = state.returned.pop(key)
        else:
            message = (state.made[key] if state.trains else state.made.pop(key)).values
        expected = travel.shape(arguments)
        if tuple(message.shape) != expected:
            raise CannotRun(
                f"stage {action.stage} of the pipeline made a tensor {list(message.shape)} and the next one waits for"
                f" {list(expected)}; give batches of the shape that the model was looked at with"
            )
        message = message.to(travel.dtype).contiguous()
        if action.kind == "send_forward" and state.trains and self._plan.pp_schedule != "zero-bubble":
            state.made[key].is_sent()  # a backward pass of inputs alone walks the graph from the tensor
        while len(state.sent) >= _ON_THEIR_WAY or (state.sent and state.sent[0][0].is_completed()):
            work, _ = state.sent.pop(0)
            work.wait()
        state.sent.append((dist.isend(message, rank, group=group), message))

    def _travel(self, action: Action) -> Travel:
        is_own = action.kind in ("receive_forward", "send_backward")
        return self.stages.received_by(action.stage if is_own else action.stage + 1)

    def _arrived(self, kind: Kind, key: tuple[int, int], state: _State) -> torch.Tensor | None:
        arrival = state.arriving.pop(Action(kind, *key), None)
        if arrival is None:
            return None
        work, tensor = arrival
        work.wait()
        received: torch.Tensor = tensor
        return received


def _last_of_each(actions: Sequence[Action]) -> dict[int, int]:
    """Find the last pass of each stage that adds gradients of weights."""
    return {
        action.stage: number for number, action in enumerate(actions) if action.kind in ("backward", "backward_weight")
    } or {-1: -1}


def _backward_input(
    output: torch.Tensor, gradient: torch.Tensor | None, given: torch.Tensor, weights: Sequence[nn.Parameter]
) -> Any:
    return backward_of_input(output, gradient, given, iter(weights)), weights


def _backward_weight(left: Any) -> None:
    if left is not None:
        backward_of_weights(iter(left[1]), left[0])


# Weights that two stages have.


def sum_shared(gradients: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Add up over the first stage and the last the gradients of weights that both have, in place.

    They are whole or shards, which both stages cut alike, by names that both have for them.
    """
    if not gradients:
        return
    group, ranks = mesh.group("pp"), mesh.size("pp")
    other = dist.get_global_rank(group, ranks - 1 if mesh.rank("pp") == 0 else 0)
    for _, own in sorted(gradients.items()):
        sent, theirs = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        both = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, theirs, other, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        own.add_(theirs)
