"""The page: one HTML file that holds everything it shows, asks for nothing, and reads as well printed."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dsplan.render.html import blocks_html, plain
from dsplan.report.picture import Picture, templates
from hardware_db.errors import DsplanError
from hardware_db.records import dataclass

_HERE = Path(__file__).parent
_MOST_TITLE = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of the page: `html` is safe as it is, pictures follow it."""

    name: str
    """One word, for links."""
    title: str
    html: str = ""
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Content of the page. Names of sections and of pictures are unlike each other."""

    title: str
    about: str
    """One line below the title."""
    sections: Sequence[Section]
    footer: str
    """By what and when."""

    @property
    def pictures(self) -> tuple[str, ...]:
        """Their names in the order of the page."""
        return tuple(picture.name for section in self.sections for picture in section.pictures)


def page_html(page: Page) -> str:
    """Return the file.

    Raises:
        DsplanError: plotly is not installed.
    """
    library, own = _library(), (_HERE / "page.js").read_text(encoding="utf-8")
    figures = {picture.name: picture.figure for section in page.sections for picture in section.pictures}
    data = _json({"figures": figures, "templates": templates()})
    title = plain(page.title, most=_MOST_TITLE)
    links = "".join(f'<li><a href="#{escape(part.name)}">{plain(part.title)}</a></li>' for part in page.sections)
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(library, own)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{style()}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">Skip to the content</a>\n'
        f"<header><h1>{title}</h1><p>{plain(page.about)}</p></header>\n"
        f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav>\n'
        f'<main id="content" tabindex="-1">\n{"".join(_section(part) for part in page.sections)}</main>\n'
        f"<footer><p>{plain(page.footer)}</p></footer>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{library}</script>\n<script>{own}</script>\n</body>\n</html>\n"
    )


def style() -> str:
    """Return the looks of the page, for others that stand beside it."""
    return (_HERE / "page.css").read_text(encoding="utf-8")


def _section(section: Section) -> str:
    name = escape(section.name)
    pictures = "".join(_figure(picture) for picture in section.pictures)
    heading = f'<h2 id="{name}-title">{plain(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{section.html}{pictures}</section>\n'


def _figure(picture: Picture) -> str:
    """Return a picture with its words; its numbers are one click away, and open in print."""
    keys = "".join(
        f"<li>{_key(colour, picture.signs.get(name))}{plain(name)}</li>" for name, colour in picture.legend.items()
    )
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    name, title = escape(picture.name), _already_escaped(picture.title)
    # What plotly shows of a height, so that nothing below it moves when it is drawn.
    height = int(picture.figure.get("layout", {}).get("height", 400))
    numbers = (
        f'<details><summary>Numbers<span class="hidden"> of {title}</span></summary>'
        f'<div class="wide" role="group" tabindex="0" aria-label="Numbers of {title}">{blocks_html([picture.table])}'
        "</div></details>"
        if picture.table.rows
        else ""
    )
    return (
        f'<figure id="{name}"><figcaption><h3>{title}</h3><p>{_already_escaped(picture.caption)}</p></figcaption>'
        f'{legend}<div class="plot" id="plot-{name}" role="img" aria-label="{title}" style="min-height:{height}px">'
        f"</div>{numbers}</figure>"
    )


def _key(colour: str, sign: str | None) -> str:
    if sign is None:
        return f'<span class="key" style="background:{escape(colour)}"></span>'
    return f'<span class="sign" style="color:{escape(colour)}" aria-hidden="true">{escape(sign)}</span>'


def _already_escaped(text: str) -> str:
    """Return what `picture.label` made safe for plotly, also for a quoted attribute."""
    return text.replace('"', "&quot;").replace("'", "&#x27;")


def wide(html: str, name: str) -> str:
    """HTML that may be wider than a phone: it scrolls by itself, with the keyboard too."""
    return f'<div class="wide" role="group" tabindex="0" aria-label="{plain(name)}">{html}</div>'


def blocks_section(name: str, title: str, blocks: Iterable[Any], pictures: Sequence[Picture] = ()) -> Section:
    """Return a section of blocks and pictures."""
    return Section(name=name, title=title, html=wide(blocks_html(blocks), title), pictures=pictures)


# What is in the file beside words.


def _library() -> str:
    """plotly.js as plotly ships it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise DsplanError(
            "plotly is not installed here, and a report draws with it; pip install 'dsplan[report]'"
        ) from None
    text: str = get_plotlyjs()
    return text.replace("\r\n", "\n").strip()


def _policy(*scripts: str) -> str:
    """Nothing may be asked for, and no script runs but these."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _json(value: Any) -> str:
    """JSON that ends no script element, whatever is in it."""
    text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Return the same with None for numbers that JSON has not got."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
