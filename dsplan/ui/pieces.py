"""Pieces of the page as HTML: one plan's files, and what pictures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from dsplan.render.html import plain
from dsplan.report import plans as pictures
from dsplan.ui.address import MOST_FILES, with_labels
from hardware_db.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFiles:
    """The files of one plan of an answer."""

    address: str
    rank: int
    files: Mapping[str, str]
    """Texts by path; a folder is a format."""
    duties: Mapping[str, Sequence[str]]
    """What a script must do itself, by format."""

    def link(self, path: str = "") -> str:
        """Return where they are to be had, all of them or one, for a quoted attribute."""
        file = f"&file={quote(path)}" if path else ""
        return plain(f"files?{self.address}{'&' if self.address else ''}plan={self.rank}{file}", most=None)


def files_html(plan: PlanFiles) -> str:
    """Links to every file of a plan, and what is in them."""
    if not plan.files:
        return "<p>There is no plan whose configs could be written.</p>"
    formats: dict[str, list[str]] = {}
    for path in plan.files:
        formats.setdefault(path.rpartition("/")[0], []).append(path)
    link = f'<a class="download" href="{plan.link()}" download>All files of plan {plan.rank} as a zip</a>'
    return f"<p>{link}</p>" + "".join(_format_html(plan, name, paths) for name, paths in formats.items())


def _format_html(plan: PlanFiles, name: str, paths: Sequence[str]) -> str:
    duties = "".join(f"<li>{plain(duty)}</li>" for duty in plan.duties.get(name, ()))
    needs = f"<p>It holds for a script that</p><ul>{duties}</ul>" if duties else ""
    names = ", ".join(path.rpartition("/")[2] for path in paths)
    heading = f"<summary>{plain(name or 'dsplan')} <small>{plain(names)}</small></summary>"
    return f"<details>{heading}{needs}{''.join(_file_html(plan, path) for path in paths)}</details>"


def _file_html(plan: PlanFiles, path: str) -> str:
    link = f'<a href="{plan.link(path)}" download>Download {plain(path.rpartition("/")[2])}</a>'
    text = plain(plan.files[path], most=None)
    return f'<p>{link}</p><pre tabindex="0" role="region" aria-label="{plain(path)}">{text}</pre>'


PICTURES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "memory": ("Memory per GPU: the line is the limit, the whisker the upper bound", pictures.MEMORY),
    "seconds": ("One step: the whisker is where nine of ten should lie", pictures.SECONDS),
    "step": ("The plan's step on two streams", {name: colour for name, (colour, _) in pictures.STEP.items()}),
    "trade": ("Step time against memory: further down and left is better", {}),
}
"""What each picture shows and what its colours mean, in the order of the page."""


FILES = f"""<div id="files-in"><label for="trainer-files">A trainer's own config or script</label>
<input type="file" id="trainer-files" multiple aria-describedby="files-hint">
<p id="files-hint">axolotl, TRL, DeepSpeed, Megatron and others: chosen here or dropped on the page. It is read and
never run; at most {MOST_FILES} files of one training.</p></div>"""
"""Where files are chosen; `page.js` reads them."""
NO_PICTURES = "<p>No plan is here to be drawn; the text above says what fits.</p>"
"""Shown in place of pictures before there is an answer, and where no plan fits."""


def picture_heading(name: str) -> str:
    """Return what a picture shows, and what its colours mean."""
    text, colours = PICTURES[name]
    keys = "".join(
        f'<li><span style="background:{colour}"></span>{plain(part)}</li>' for part, colour in colours.items()
    )
    return f"<h3>{plain(text)}</h3>{f'<ul class=legend>{keys}</ul>' if keys else ''}"


def command_html(address: str, command: str) -> str:
    """Return where the same is to be had: as a report, and in a terminal."""
    link = plain(f"report?{address}", most=None)
    return f'<p><a href="{link}" download>Download a report with all curves</a></p><code>{plain(command)}</code>'


def failure_html(error: str) -> str:
    """Return why there is no answer, where screen readers say it at once."""
    return f'<p class="style-bad" role="alert">{with_labels(plain(error))}</p>'


def unknown_html(names: Sequence[str]) -> str:
    """Return what of an address nobody understands."""
    return "".join(
        f'<p class="style-warning">the address has {plain(name)}, which is no flag here</p>' for name in names
    )
