"""Findings of the doctor, as text and JSON."""

from __future__ import annotations

from typing import Any

from dsplan.diagnostics.doctor.finding import Diagnosis, Finding, Level, LinkTime
from dsplan.render.show import Block, Style, Text
from dsplan.render.table_columns import Table, columns
from hardware_db.units import format_bytes, format_seconds

_STYLES: dict[Level, Style] = {"ok": "", "warning": "warning", "problem": "bad"}
_MOST_LINKS = 12


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that was found, by field; seconds and bytes per second."""
    return {
        "schema_version": 1,
        "hosts": list(diagnosis.hosts),
        "ranks": diagnosis.ranks,
        "healthy": diagnosis.exit_code == 0,
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "links": [
            {
                "ranks": list(link.ranks),
                "hosts": list(link.hosts),
                "kind": link.kind,
                "backend": link.backend,
                "latency_seconds": link.latency_seconds,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            }
            for link in diagnosis.links
        ],
    }


def diagnosis_blocks(diagnosis: Diagnosis) -> list[Block]:
    """Return a line per finding, worst first, the slowest links, and the verdict."""
    several = len(diagnosis.hosts) > 1
    blocks: list[Block] = [
        Text(text=_line(finding, diagnosis.hosts if several else ()), style=_STYLES[finding.level])
        for finding in diagnosis.findings
    ]
    if diagnosis.links:
        blocks.append(_link_table(diagnosis.links))
    return [*blocks, _verdict(diagnosis)]


def _line(finding: Finding, hosts: tuple[str, ...]) -> str:
    where = f"{' '.join(finding.hosts)}: " if finding.hosts and hosts and finding.hosts != hosts else ""
    return f"{finding.level:<8} {finding.check:<9} {where}{finding.line}"


def _link_table(links: tuple[LinkTime, ...]) -> Table:
    slowest = sorted(links, key=lambda link: link.bandwidth_bytes_per_s or 0.0)[:_MOST_LINKS]
    title = "all-reduce between two ranks" + (f", the slowest {_MOST_LINKS}" if len(slowest) < len(links) else "")
    headings = columns("ranks", "link", "??over", "?>latency", ">4 MiB")
    rows = [
        [
            f"{link.ranks[0]}-{link.ranks[1]}",
            f"{link.kind}: {' and '.join(dict.fromkeys(link.hosts))}",
            link.backend,
            "-" if link.latency_seconds is None else format_seconds(link.latency_seconds),
            "-" if link.bandwidth_bytes_per_s is None else f"{format_bytes(link.bandwidth_bytes_per_s)}/s",
        ]
        for link in slowest
    ]
    return Table(columns=headings, rows=rows, title=title)


def _verdict(diagnosis: Diagnosis) -> Text:
    count = {level: sum(finding.level == level for finding in diagnosis.findings) for level in _STYLES}
    taken_part = f"{_count(len(diagnosis.hosts), 'node')}, {diagnosis.ranks} ranks: " if diagnosis.ranks > 1 else ""
    complaints = f"{_count(count['problem'], 'problem')}, {_count(count['warning'], 'warning')}"
    sentence = f"{taken_part}{complaints}, {_count(count['ok'], 'check')} fine"
    return Text(text=sentence, style="bad" if count["problem"] else "heading")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
