"""Write docs/reference/public-scripts.md from scripts/peers/public_scripts.json; `--check` compares only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from scripts.generate.generated import REFERENCE, write_or_check
from scripts.peers.public_recipes import PROJECTS, RECIPES, Recipe
from scripts.peers.public_scripts import RESULTS, WAYS

Outcomes = Mapping[str, Mapping[str, Any]]
"""What became of a script, by way."""
_PLAIN_WAYS = WAYS[:-1]

PAGE = """# Other people's scripts under `dsplan run`

<!-- written by scripts/report/public_scripts.py from scripts/peers/public_scripts.json -->

Training scripts of public projects, fetched at one commit each and started with `dsplan run`:

```
python -m scripts.peers.public_scripts fetch DIR
python -m scripts.peers.public_scripts run DIR
python -m scripts.report.public_scripts
```

Versions: {versions}. Two ranks on CPUs (one for nanochat), gloo, one thread per rank. The models are small ones made
from configs, the text is the source of Python's standard library, and the Hub is not asked: what is shown is whether a
script trains under the plan that was asked for, not how fast. {unedited} of the {count} scripts are run as they are;
`edits` counts the lines that had to be changed, which [are listed below](#edits).

## What becomes of them

Each cell has the loss of the first and of the last step, which is the mean over ranks; `free` is a run for which
nothing was asked, and names the strategy that the planner chose. `refused` is a run that ends with status 2 and one
line, before it trains or at the call that cannot be; the lines are below the table. `killed` is a run that saves every
two steps (`--checkpoint-steps 2`), under zero2 where that is not refused, and in which one rank gets SIGKILL after its
fourth step. The cell has the first step that was made after that, and the largest difference of any step's loss from
the undisturbed run of the same strategy, where a script is seeded and shows its losses. – has not been run.

{outcomes}

{notes}

## Predicted against measured

Predicted over measured, of a rank's peak memory and of the seconds of a step. Other work ran on the machine's four
cores, and models as small as these spend most of a step outside what is planned for, so the second says little more
than the order of magnitude; [Accuracy](accuracy.md) has the runs that were made for it.

{predicted}

## Edits

{edits}

## Commits

{commits}
"""


def main() -> int:
    return write_or_check(REFERENCE / "public-scripts.md", page(json.loads(RESULTS.read_text(encoding="utf-8"))))


def page(results: Mapping[str, Any]) -> str:
    """The page, from the results of the runs."""
    scripts: Mapping[str, Outcomes] = results["scripts"]
    ran = [recipe for recipe in RECIPES if recipe.name in scripts]
    return PAGE.format(
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        unedited=sum(not recipe.edits for recipe in ran),
        count=len(ran),
        outcomes="\n".join(_table(ran, scripts, WAYS, _outcome, ("edits",))),
        notes="\n".join(_notes(ran, scripts)),
        predicted="\n".join(_table(ran, scripts, _PLAIN_WAYS, _ratios)),
        edits="\n".join(_edits(ran)),
        commits="\n".join(
            f"- [{project.name}](https://github.com/{project.name}/tree/{project.commit}): `{project.commit[:10]}`"
            for project in PROJECTS.values()
        ),
    )


def _table(
    ran: list[Recipe], scripts: Mapping[str, Outcomes], ways: tuple[str, ...], cell: Any, more: tuple[str, ...] = ()
) -> Iterator[str]:
    columns = ("script", "trains with", *more, *ways)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for recipe in ran:
        outcomes = scripts[recipe.name]
        before = (recipe.name, recipe.library, *(str(recipe.edited_lines) for _ in more))
        cells = (cell(outcomes[trial], trial) if trial in outcomes else "–" for trial in ways)
        yield f"| {' | '.join((*before, *cells))} |"


def _outcome(outcome: Mapping[str, Any], trial: str) -> str:
    if outcome["outcome"] != "completed":
        return str(outcome["outcome"])
    if trial == "killed":
        return _killed(outcome)
    first, last = outcome["first_loss"], outcome["last_loss"]
    losses = f"{outcome['steps']} steps" if first is None else f"{first:.4g} → {last:.4g}"
    return losses if trial != "free" else f"{outcome['strategy'] or 'no plan'}: {losses}"


def _killed(outcome: Mapping[str, Any]) -> str:
    if outcome["killed_at"] is None:
        return "ended before it was killed"
    step, difference = outcome["resumed_at"], outcome["loss_difference"]
    begins = "began anew" if step == 1 else f"resumed at step {step}"
    return begins if difference is None else f"{begins}, {difference:.1g}"


def _ratios(outcome: Mapping[str, Any], trial: str) -> str:
    pairs = [(outcome.get(f"predicted_{what}"), outcome.get(f"measured_{what}")) for what in ("bytes", "seconds")]
    texts = [f"{predicted / measured:.2f}" if predicted and measured else "–" for predicted, measured in pairs]
    return " / ".join(texts) if texts != ["–", "–"] else "–"


def _notes(ran: list[Recipe], scripts: Mapping[str, Outcomes]) -> Iterator[str]:
    """Yield what was said by runs that were refused or failed."""
    for recipe in ran:
        ended = [
            (ended_as["outcome"], _without(trial, ended_as["reason"]), trial)
            for trial, ended_as in scripts[recipe.name].items()
        ]
        ended = sorted(item for item in ended if item[0] != "completed")
        for (outcome, reason), items in groupby(ended, key=lambda item: item[:2]):
            yield f"- {recipe.name}, {', '.join(trial for *_, trial in items)}: {outcome}: `{reason}`"


def _without(trial: str, reason: str) -> str:
    """The line for any strategy that was asked for."""
    return reason.replace(f"'{trial}'", "NAME").replace(f"--strategy {trial}", "--strategy NAME")


def _edits(ran: list[Recipe]) -> Iterator[str]:
    yield "| script | file | lines | what stands there |"
    yield "|---|---|---|---|"
    for recipe in ran:
        for (file, why), edits in groupby(recipe.edits, key=lambda edit: (edit.file, edit.why)):
            lines = sum(edit.lines for edit in edits)
            yield f"| {recipe.name} | {file.rpartition('/')[2]} | {lines} | {why} |"


if __name__ == "__main__":
    sys.exit(main())
