"""Measures how long `dsplan ui` takes from a changed field to its answer: in a browser alone, and for many at once.

The server and its processes run on the first cores that this process may use, `--cores` of them; the browser and the
others who ask run on all. Every question is a new one. Needs the extras `ui` and `dev`, and Chromium.

    python -m scripts.bench.ui [--cores 2] [--users 8] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any

import psutil

from hardware_db.probe.cgroup import usable_cores
from tests.dsplan.browser import chromium

MODELS = ("llama-3-8b", "opt-13b", "mixtral-8x7b", "qwen2.5-7b", "llama-2-70b", "gpt2-xl", "mistral-7b", "gemma-2-9b")
START_SECONDS = 120


@contextmanager
def server(cores: int) -> Iterator[str]:
    """Start `dsplan ui` on this many cores and give its address."""
    held = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, "-m", "dsplan", "ui", "--workers", str(cores)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, held)
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().partition(" at ")[2].partition(" ")[0] + "/"
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(url).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def processor_seconds(name: str) -> float:
    """Return what the processes that this one started have used, those whose command has `name` in it."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                times = process.cpu_times()
                used += times.user + times.system
    return used


SERVER, BROWSER = "dsplan", "chrom"


def in_browser(url: str, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Measure seconds from a changed number of GPUs to the new answer, and the processors' seconds for one.

    These are of the server and of the browser.
    """
    from playwright.sync_api import sync_playwright

    taken = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--disable-dev-shm-usage"])
        page = browser.new_page()
        page.goto(f"{url}?model=llama-3-8b&gpus=8&gpu=H100-SXM5-80GB")
        page.locator(".trace path").first.wait_for()
        before = {name: processor_seconds(name) for name in (SERVER, BROWSER)}
        for number in range(rounds):
            gpus = 16 + 8 * number
            page.evaluate(_WATCH, f"{gpus} x H100")
            page.get_by_label("GPUs in total").fill(str(gpus))
            taken.append(float(page.evaluate("() => window.taken")) / 1000)
        used = {name: (processor_seconds(name) - seconds) / rounds for name, seconds in before.items()}
        browser.close()
    return taken, used


# Resolves when the answer has the text, measured in the page from the change of the field.
_WATCH = """text => {
  const field = document.querySelector('#field-gpus input')
  window.taken = new Promise(resolve => {
    field.addEventListener('input', () => {
      const begin = performance.now()
      const look = () => document.querySelector('#plans').textContent.includes(text)
        ? requestAnimationFrame(() => resolve(performance.now() - begin)) : setTimeout(look, 5)
      look()
    }, {once: true})
  })
}"""


def at_once(url: str, users: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of every answer, and of the last of those who asked at once, as the page asks and over HTTP."""
    config = json.loads(urllib.request.urlopen(f"{url}config").read())
    opened = next(entry["id"] for entry in config["dependencies"] if entry["targets"][0][1] == "load")
    questions_of_all = (f"model={model}&gpus={gpus}&gpu=H100-SXM5-80GB" for gpus in count(8, 8) for model in MODELS)
    each, last = [], []
    for _ in range(rounds):
        questions = list(islice(questions_of_all, users))
        with ThreadPoolExecutor(users) as pool:
            taken = list(pool.map(lambda question: _answered(url, opened, question), questions))
        each += taken
        last.append(max(taken))
    return each, last


def _answered(url: str, opened: int, question: str) -> float:
    begin, session = time.perf_counter(), uuid.uuid4().hex
    body: dict[str, Any] = {"data": [], "fn_index": opened, "session_hash": session}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}gradio_api/queue/join?{question}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()
    with urllib.request.urlopen(f"{url}gradio_api/queue/data?session_hash={session}") as events:
        completed = next(line for line in events if b'"process_completed"' in line)
    if b"role=" in completed.partition(b"plan-choice")[0] and b"alert" in completed:
        raise SystemExit(f"{question} has no answer")
    return time.perf_counter() - begin


def summarise(name: str, seconds: Sequence[float]) -> str:
    """Return a line with the median and the range of some seconds."""
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    middle = statistics.median(ordered)
    return f"{name}: p50 {middle:.2f} s, p95 {p95:.2f} s, longest {ordered[-1]:.2f} s of {len(ordered)}"


def main() -> None:
    """Print how fast the page answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with server(options.cores) as url:
        taken, used = in_browser(url, options.rounds)
        print(summarise(f"a changed field, in a browser, {options.cores} cores", taken))
        print(f"  processor seconds: {used[SERVER]:.2f} of the server, {used[BROWSER]:.2f} of the browser")
        before = processor_seconds(SERVER)
        each, last = at_once(url, options.users, options.rounds)
        together = (processor_seconds(SERVER) - before) / options.rounds
        print(summarise(f"{options.users} at once, {options.cores} cores, each answer", each))
        print(summarise(f"{options.users} at once, {options.cores} cores, the last answer", last))
        print(f"  processor seconds: {together:.2f} of the server, {together / options.cores:.2f} on every core")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {usable_cores()} cores")


if __name__ == "__main__":
    main()
