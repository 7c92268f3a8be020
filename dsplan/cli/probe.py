"""`dsplan probe`: what this machine has."""

from __future__ import annotations

from dsplan.cli.flags import JsonFlag


def probe(json: JsonFlag = False) -> None:
    """This machine: GPUs, links, host, software.

    With free memory, other processes on the GPUs, and what holds them back.
    """
    from dsplan.render import machine as render
    from dsplan.render.show import show, show_json
    from hardware_db.probe import probe as look

    machine = look()
    if json:
        show_json(render.as_json(machine))
    else:
        show(render.machine_blocks(machine))
