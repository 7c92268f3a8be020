"""The page, in Gradio, and the server that has it: nothing of the machine but the page, its answers and their files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import fastapi
import gradio as gr
from gradio.components.plot import PlotData
from gradio.themes.utils import sizes

from dsplan.ui import pieces
from dsplan.ui.address import (
    PLAN,
    SECTIONS,
    START,
    Field,
    address_plan,
    address_texts,
    drop_part,
    page_fields,
    read_address,
    read_values,
    with_labels,
    write,
)
from dsplan.ui.answers import OF_PLANS, Answer, Task
from dsplan.ui.gate import Gate
from dsplan.ui.runs import RunsPage
from dsplan.ui.workers import Answers
from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.notices import label_lines

_HERE = Path(__file__).parent
_AT_ONCE = 32
"""Answers that the page waits for at once; others wait in line."""
_MOST_WAITING = 200
_HINTS: Mapping[str, str] = {
    "model": "Name, Hub id, or a size such as 7B.", "gpus": "Over all nodes.", "gpu": "Or a node type, under Hardware.",
    "node_type": "What a node is: GPUs, links, host.", "interconnect": "4xNAME for four in a node.",
    "code": "Whose modules run.",
}  # fmt: skip
"""In place of the command line's help, where that speaks of files and of other commands."""
_UNSAID = "by default"


def application(answers: Answers, runs: RunsPage | None = None) -> fastapi.FastAPI:
    """Return the server's application: the page at `/`, the files of a plan at `/files`, a report at `/report`.

    The table of a team's runs is at `/runs`, where there is one.
    """
    server = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    server.add_api_route("/files", _files_route(answers), methods=["GET"])
    server.add_api_route("/report", _report_route(answers), methods=["GET"])
    server.add_api_route("/runs", _runs_route(runs), methods=["GET"])
    gr.mount_gradio_app(
        server,
        page(answers),
        path="/",
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        show_error=True,
        max_file_size=0,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=_theme(),
        head=_head(),
    )
    server.add_middleware(Gate)
    return server


def _head() -> str:
    """Return the page's looks and behaviour.

    Gradio rewrites what it takes as `css`, and loses what narrow windows need.
    """
    style, script = ((_HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return f"<style>{style}</style><script>{script}</script>"


def _theme() -> Any:
    """Gradio's plain theme in fonts that every system has: others would be asked of Google."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.slate,
        text_size=sizes.text_md,
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
    )


# The page.


def page(answers: Answers) -> gr.Blocks:
    """Return the page as Gradio has it; it is answered by `answers`."""
    with gr.Blocks(title="dsplan", analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(_HEADING, padding=False)
        with gr.Row(elem_id="columns"):
            with gr.Column(scale=1, min_width=280, elem_id="question"):
                gr.HTML(pieces.FILES, padding=False)
                files = gr.Textbox(visible=False)
                check = gr.Button("Check", elem_id="check-files")  # pressed by the script, when files are there
                fields, config = _question_fields()
            with gr.Column(scale=3, min_width=340, elem_id="answer"):
                outputs = _answer_fields()
        _connect(blocks, answers, fields, config, outputs)
        _connect_files(answers, files, check, {**fields, "config": config}, outputs)
    blocks.queue(max_size=_MOST_WAITING, default_concurrency_limit=_AT_ONCE, api_open=False)
    return blocks


_HEADING = """<header><h1>dsplan</h1>
<p>Will it fit, and what is the fastest way to train it? Memory and time are predicted; nothing is run.</p></header>"""


def _question_fields() -> tuple[dict[str, Any], Any]:
    """Return a component for every field, and that of a config.json."""
    components: dict[str, Any] = {}
    for section, names in SECTIONS.items():
        if section == "Question":
            components.update({name: _component(page_fields()[name]) for name in names})
            with gr.Accordion("Another model: its config.json", open=False):
                config = gr.Textbox(
                    label="config.json", info="Pasted here, it takes the place of the model.", lines=4, max_lines=12
                )
        else:
            with gr.Accordion(section, open=False):
                components.update({name: _component(page_fields()[name]) for name in names})
    return components, config


def _component(field: Field) -> Any:
    """Return the input of a field; its hint ends with the flag that it stands for."""
    info = f"{with_labels(_HINTS.get(field.name, field.help))} `--{field.flag}`"
    named = {"label": field.label, "info": info, "elem_id": f"field-{field.flag}"}
    if field.kind == "switch":
        return gr.Checkbox(value=False, **named)
    if field.kind == "choice":
        unsaid = [(_UNSAID, "")] if field.default is None else []
        return gr.Dropdown(
            [*unsaid, *((choice, choice) for choice in field.choices)], value=write(field.default), **named
        )
    if field.name in _CATALOGUES:
        names = _CATALOGUES[field.name]()
        return gr.Dropdown(names, value=START.get(field.name, ""), allow_custom_value=True, filterable=True, **named)
    if field.kind in ("whole", "fraction") and not field.suffixes:
        return gr.Number(value=field.read(START.get(field.name, "")), placeholder=_UNSAID, **named)
    return gr.Textbox(value="", placeholder=_UNSAID, max_lines=1, **named)


def _model_names() -> list[str]:
    from planner.models.catalogue import every_model

    return sorted({min((row.name, *row.aliases), key=len) for row in every_model()}, key=str.lower)


def _device_names() -> list[str]:
    from hardware_db.datasheets import devices

    return [device.name for device in devices()]


def _node_type_names() -> list[str]:
    from hardware_db.datasheets import node_types

    return ["", *(node.name for node in node_types())]


def _link_names() -> list[str]:
    from hardware_db.datasheets import links

    return ["", *(link.name for link in links() if link.scope == "inter")]


_CATALOGUES = {"model": _model_names, "gpu": _device_names, "node_type": _node_type_names, "interconnect": _link_names}


def _answer_fields() -> dict[str, Any]:
    """Return what shows the answer, by name."""
    components: dict[str, Any] = {"address": gr.Textbox(visible=False)}
    with gr.Row(elem_id="sharing"):
        components["copy"] = gr.Button("Copy link", size="sm", elem_id="copy-link", scale=0, min_width=120)
        components["command"] = gr.HTML("", elem_id="command", padding=False)
    components["check"] = gr.HTML("", elem_id="check", padding=False)
    components["plans"] = gr.HTML("", elem_id="plans", padding=False)
    components["choice"] = gr.Radio([], label="Plan", elem_id="plan-choice", visible=False)
    with gr.Tabs(elem_id="views"):
        # Hidden while there is none: Gradio labels the place of a missing picture in a way that axe-core refuses.
        with gr.Tab("Pictures"):
            components["no_pictures"] = gr.HTML(pieces.NO_PICTURES, padding=False)
            with gr.Column(visible=False) as components["pictures"]:
                for name in pieces.PICTURES:
                    gr.HTML(pieces.picture_heading(name), padding=False)
                    components[name] = gr.Plot(show_label=False, container=False, elem_id=f"picture-{name}")
        with gr.Tab("Figures"):
            components["plan"] = gr.HTML("", elem_id="plan", padding=False)
        with gr.Tab("Configs"):
            components["files"] = gr.HTML("", elem_id="files", padding=False)
        with gr.Tab("Why not others"):
            components["rejected"] = gr.HTML("", elem_id="rejected", padding=False)
    return components


_OF_A_PLAN = ("address", "plan", "step", "files")
_OF_AN_ANSWER = ("command", "plans", "choice", "rejected", "pictures", "no_pictures", *OF_PLANS, *_OF_A_PLAN)
"""What of the page an answer changes."""


def _connect(blocks: gr.Blocks, answers: Answers, fields: dict[str, Any], config: Any, shown: dict[str, Any]) -> None:
    """Return what happens when something on the page is changed, and when it is opened."""
    inputs = [*fields.values(), config]
    outputs = [shown[name] for name in _OF_AN_ANSWER]

    def changed(address: str, *values: Any) -> list[Any]:
        texts = {name: write(value) for name, value in zip(fields, values, strict=False)}
        updates = _update_answer(answers, texts, values[-1] or "", shown_query=drop_part(address, PLAN))
        return [gr.skip() for _ in outputs] if updates is None else _in_order(_OF_AN_ANSWER, updates)

    def opened(request: gr.Request) -> list[Any]:
        """Return the address's question in the fields, and its answer."""
        query = urlencode(list(request.query_params.multi_items()))
        try:
            texts, packed, unknown = address_texts(query)
        except DsplanError as error:
            return [*(gr.skip() for _ in inputs), *_in_order(_OF_AN_ANSWER, _update_failure(str(error)))]
        values = [_component_value(field, texts.get(name, "")) for name, field in page_fields().items()]
        updates = _update_answer(answers, texts, packed, rank=address_plan(query)) or {}
        updates["plans"] = pieces.unknown_html(unknown) + updates["plans"]
        return [*values, packed, *_in_order(_OF_AN_ANSWER, updates)]

    def chosen(address: str, choice: str | None) -> list[Any]:
        query = drop_part(address, PLAN)
        try:
            answer = answers.ask(Task(kind="plan", query=query, plan=_rank(choice)))
        except DsplanError as error:
            return [address, pieces.failure_html(str(error)), None, ""]
        return _in_order(_OF_A_PLAN, _plan_parts(query, answer))

    hidden, show_address = _hidden(shown), _show_address(shown)
    immediate = [field.input for field in fields.values() if not isinstance(field, gr.Textbox)]
    finished = [event for field in inputs if isinstance(field, gr.Textbox) for event in (field.submit, field.blur)]
    gr.on(
        [*immediate, *finished], changed, [shown["address"], *inputs], outputs, trigger_mode="always_last", **hidden
    ).then(**show_address)
    blocks.load(opened, None, [*inputs, *outputs], **hidden).then(**show_address)
    of_a_plan = [shown[name] for name in _OF_A_PLAN]
    choice = shown["choice"]
    choice.input(chosen, [shown["address"], choice], of_a_plan, trigger_mode="always_last", **hidden).then(
        **show_address
    )
    shown["copy"].click(None, js="() => window.dsplanCopy()")


def _connect_files(answers: Answers, files: Any, check: Any, inputs: dict[str, Any], shown: dict[str, Any]) -> None:
    """Connect files that somebody drops or chooses: a trainer's own are checked, and the page asks what they ask."""

    def checked(handed_in: str, *values: Any) -> list[Any]:
        texts = {name: write(value) for name, value in zip(inputs, values, strict=True)}
        config = texts.pop("config")
        try:
            query = read_values(texts, config).address()
            answer = answers.ask(Task(kind="check", query=query, files=handed_in))
        except DsplanError as error:
            answer = {"error": str(error)}
        if "fields" not in answer:
            text = pieces.failure_html(answer["error"]) if "error" in answer else answer["html"]
            return [text, *(gr.skip() for _ in outputs[1:])]
        texts, config = {**texts, **answer["fields"]}, answer["config"]
        updates = _update_answer(answers, texts, config) or {}
        filled = [_component_value(field, texts.get(name, "")) for name, field in page_fields().items()]
        return [answer["html"], *filled, config, *_in_order(_OF_AN_ANSWER, updates)]

    outputs = [shown["check"], *inputs.values(), *(shown[name] for name in _OF_AN_ANSWER)]
    check.click(
        checked, [files, *inputs.values()], outputs, js="(_, ...others) => [window.dsplanFiles, ...others]",
        trigger_mode="always_last", **_hidden(shown),
    ).then(**_show_address(shown))  # fmt: skip


def _hidden(shown: dict[str, Any]) -> dict[str, Any]:
    return {"show_progress": "minimal", "show_progress_on": shown["plans"], "api_visibility": "private"}


def _show_address(shown: dict[str, Any]) -> dict[str, Any]:
    return {"fn": None, "inputs": [shown["address"]], "js": "(address) => window.dsplanAddress(address)"}


def _in_order(names: tuple[str, ...], updates: Mapping[str, Any]) -> list[Any]:
    return [updates[name] for name in names]


def _component_value(field: Field, text: str) -> Any:
    """Return what a component shows for a text of the address, which may be one that is refused."""
    if field.kind == "switch":
        return text == "true"
    if field.kind == "choice":
        return text if text in field.choices else write(field.default)
    if field.kind in ("whole", "fraction") and not field.suffixes:
        try:
            return field.read(text)
        except DsplanError:
            return None
    return text


def _update_answer(
    answers: Answers, texts: Mapping[str, str], config: str, *, rank: int = 1, shown_query: str | None = None
) -> dict[str, Any] | None:
    """Everything that shows an answer, by name; None if the question is the one at the address `known`, answered."""
    try:
        values = read_values(texts, config)
        query = values.address()
        if query == shown_query:
            return None
        answer = answers.ask(Task(kind="plans", query=query, plan=rank))
    except DsplanError as error:
        return _update_failure(str(error))
    if "error" in answer:
        return _update_failure(answer["error"], query)
    labels = answer["plans"]
    return {
        "command": pieces.command_html(query, answer["command"]),
        "plans": answer["html"],
        "choice": gr.Radio(choices=labels, value=labels[answer["rank"] - 1] if labels else None, visible=bool(labels)),
        "rejected": answer["rejected"],
        **_update_pictures(answer["pictures"]),
        **_plan_parts(query, answer),
    }


def _plan_parts(query: str, answer: Answer) -> dict[str, Any]:
    rank = answer["rank"]
    address = query if rank == 1 else f"{query}&{PLAN}={rank}"
    files = pieces.PlanFiles(address=query, rank=rank, files=answer["files"], duties=answer["duties"])
    step = _plot(answer["step"])
    return {"address": address, "plan": answer["plan"], "step": step, "files": pieces.files_html(files)}


def _update_pictures(pictures: Mapping[str, str]) -> dict[str, Any]:
    shown = {"pictures": gr.Column(visible=bool(pictures)), "no_pictures": gr.HTML(visible=not pictures)}
    return {**shown, **{name: _plot(pictures.get(name, "")) for name in OF_PLANS}}


def _plot(picture: str) -> Any:
    return PlotData(type="plotly", plot=picture) if picture else None


def _update_failure(error: str, address: str = "") -> dict[str, Any]:
    """Return what is shown in place of an answer; without an address the next try is asked anew."""
    empty = dict.fromkeys(_OF_AN_ANSWER, "")
    no_choice = gr.Radio(choices=[], value=None, visible=False)
    return {
        **empty,
        **_update_pictures({}),
        "step": None,
        "address": address,
        "plans": pieces.failure_html(error),
        "choice": no_choice,
    }


def _rank(choice: str | None) -> int:
    """Return the rank with which the name of a choice begins."""
    first = (choice or "").partition(".")[0]
    return int(first) if first.isdecimal() and len(first) < 4 else 1


# Files of a plan, made for whoever asks for them; nothing is written on the server.


def _files_route(answers: Answers) -> Any:
    def files(request: fastapi.Request) -> fastapi.Response:
        """Return a plan's files as a zip, or the one that `file` names."""
        query = request.url.query
        try:
            answer = _ask_or_raise(answers, drop_part(query, "file"), "plan")
            return _download(answer["rank"], answer["files"], request.query_params.get("file", ""))
        except DsplanError as error:
            return _refusal(error)

    return files


def _report_route(answers: Answers) -> Any:
    def report(request: fastapi.Request) -> fastapi.Response:
        """Return the answer as a page that needs no server."""
        try:
            text = _ask_or_raise(answers, request.url.query, "report")["report"]
        except DsplanError as error:
            return _refusal(error)
        named = {"content-disposition": 'attachment; filename="dsplan-report.html"'}
        return fastapi.Response(text, media_type="text/html; charset=utf-8", headers=named)

    return report


def _runs_route(runs: RunsPage | None) -> Any:
    def listed() -> fastapi.Response:
        """Return the table of runs as a page; nobody is told of one that is not there."""
        if runs is None:
            return fastapi.responses.PlainTextResponse("not found", status_code=404)
        return fastapi.responses.HTMLResponse(runs.html())

    return listed


def _ask_or_raise(answers: Answers, query: str, kind: str) -> Answer:
    """Return an answer to the question of an address.

    Raises:
        DsplanError: there is none.
    """
    values, unknown = read_address(query)
    if unknown:
        raise DsplanError(f"the address has {', '.join(unknown)}, which is no flag here")
    answer = answers.ask(Task(kind=kind, query=values.address(), plan=address_plan(query)))
    if "error" in answer:
        raise DsplanError(answer["error"])
    if kind == "plan" and answer["files"] and answer["rank"] != address_plan(query):
        raise DsplanError(f"there is no plan {address_plan(query)}; the last is {answer['rank']}")
    return answer


def _refusal(error: DsplanError) -> fastapi.Response:
    return fastapi.responses.PlainTextResponse(f"{label_lines(str(error))}\n", status_code=400)


def _download(rank: int, files: Mapping[str, str], wanted: str) -> fastapi.Response:
    if not files:
        raise DsplanError("no plan fits, so there is no file")
    if wanted and wanted not in files:
        raise DsplanError(f"plan {rank} has no file {quote(wanted)}; it has {', '.join(files)}")
    name = wanted.rpartition("/")[2] if wanted else f"dsplan-plan-{rank}.zip"
    content = files[wanted].encode() if wanted else _zip_files(files)
    kind = "text/plain; charset=utf-8" if wanted else "application/zip"
    return fastapi.Response(content, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


def _zip_files(files: Mapping[str, str]) -> bytes:
    """Return the files in one, the same bytes whenever they are asked for."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return packed.getvalue()
