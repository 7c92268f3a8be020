"""The processes that answer, and what they answered before: many people at once, none of whom can block the others."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

from dsplan.ui.answers import Answer, Task
from hardware_db.errors import DsplanError

_BUSY = "more people ask here than can be answered at once; ask again in a minute"
_END_SECONDS = 5


class Unanswered(DsplanError):
    """A question that got no answer this time, and may get one the next."""


class Answers(Protocol):
    """Whoever answers tasks."""

    def ask(self, task: Task) -> Answer:
        """Return the answer, made or known.

        Raises:
            Unanswered: there is none now.
        """


class Workers:
    """`count` processes that each make one answer at a time, and are replaced where one takes longer than `seconds`.

    A question waits at most `patience` seconds for a process, and not at all where `most_waiting` others do.
    """

    def __init__(self, count: int, *, seconds: float = 20.0, patience: float = 30.0, most_waiting: int = 100) -> None:
        self.seconds, self._patience = seconds, patience
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._places = threading.Semaphore(most_waiting)
        self._closed = False
        for _ in range(count):
            self._idle.put(_Worker())
        self._count = count

    def ask(self, task: Task) -> Answer:
        """Return the answer of the first process that is free.

        Raises:
            Unanswered: none is free in time, or it takes too long or too much memory.
        """
        if not self._places.acquire(blocking=False):
            raise Unanswered(_BUSY)
        try:
            worker = self._idle.get(timeout=self._patience)
        except queue.Empty:
            raise Unanswered(_BUSY) from None
        finally:
            self._places.release()
        try:
            return worker.ask(task, self.seconds)
        except Unanswered:
            worker.end()
            worker = _Worker()
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for _ in range(self._count):
            with suppress(queue.Empty):
                self._idle.get(timeout=self.seconds).end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process of `dsplan.ui.answers`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "dsplan.ui.answers"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )

    def ask(self, task: Task, seconds: float) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(seconds, self._kill, [late])
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if late.is_set():
            raise Unanswered(f"no answer within {seconds:g} seconds; ask for fewer GPUs or a smaller global batch")
        raise Unanswered("the question could not be answered; the server's terminal says why")

    def _kill(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(_END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class Remembered:
    """Answers of others, of which the latest are known; who asks what is just being answered waits for that.

    At most `most_bytes` of answers, as JSON, are kept.
    """

    def __init__(self, answers: Answers, *, most_bytes: int = 64 * 2**20) -> None:
        self._answers, self._most_bytes = answers, most_bytes
        self._known: OrderedDict[Task, Future[Answer]] = OrderedDict()
        self._sizes: dict[Task, int] = {}
        self._lock = threading.Lock()

    def ask(self, task: Task) -> Answer:
        """Return the answer, at once where it was given before.

        Raises:
            Unanswered: there is none now.
        """
        with self._lock:
            pending = self._known.get(task)
            if pending is not None:
                self._known.move_to_end(task)
            mine = self._known.setdefault(task, Future())
        return mine.result() if pending is not None else self._compute(task, mine)

    def _compute(self, task: Task, future: Future[Answer]) -> Answer:
        try:
            answer = self._answers.ask(task)
        except BaseException as error:
            with self._lock:
                del self._known[task]
            future.set_exception(error)
            raise
        with self._lock:
            self._sizes[task] = _size(answer) + len(task.files)
            while sum(self._sizes.values()) > self._most_bytes and len(self._sizes) > 1:
                oldest = next(task for task in self._known if task in self._sizes)
                del self._known[oldest], self._sizes[oldest]
        future.set_result(answer)
        return answer


def _size(answer: Mapping[str, Any]) -> int:
    return len(json.dumps(answer))
