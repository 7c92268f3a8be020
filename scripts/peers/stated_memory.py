"""Set what axolotl's examples say they take beside what `dsplan check` says of the same files.

    python -m scripts.peers.config_files fetch DIR    the configs, at their commits
    python -m scripts.peers.stated_memory DIR         checks those below and writes scripts/peers/stated_memory.json
    python -m scripts.report.config_files             the table of it

Nothing of dsplan was fitted to one of them. The figures are of axolotl's READMEs at the commit of
`scripts.peers.config_files`, rounded as they are there; they name neither the card nor the kind of figure, and samples
are as long as the data has them. A model that the catalogue lacks is counted as a decoder of its size.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsplan.checking import check_files
from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from hardware_db.units import GIB

PROJECT = "axolotl-ai-cloud/axolotl"
RESULTS = Path(__file__).with_suffix(".json")
_MISTRAL_SMALL = "mistral-small-24b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """A config below `examples/` and what its README says of it."""

    file: str
    gib: float
    """Per GPU."""
    at: str
    """README below `examples/`, and line."""
    gpu: str = "H100-SXM5-80GB"
    """The card where the README names one, else one on which the run has room."""
    gpus: int = 1
    model: str | None = None
    """The catalogue's model of the same shape, where it has the config's own under no name."""


STATED = (
    Stated(file="apertus/apertus-8b-qlora.yaml", gib=8.7, at="apertus/README.md:44"),
    Stated(file="arcee/afm-4.5b-qlora.yaml", gib=7.8, at="arcee/README.md:32"),
    Stated(file="devstral/devstral-small-qlora.yml", gib=21, at="devstral/README.md:34", model=_MISTRAL_SMALL),
    Stated(file="glm45/glm-45-air-qlora.yaml", gib=63.4, at="glm45/README.md:16"),
    Stated(file="glm47-flash/qlora.yaml", gib=24, at="glm47-flash/README.md:17", gpu="L40S"),
    Stated(file="glm47-flash/qlora_fsdp.yaml", gib=29, at="glm47-flash/README.md:21", gpu="L40S", gpus=2),
    Stated(file="glm47-flash/lora.yaml", gib=35, at="glm47-flash/README.md:27", gpu="L40S"),
    Stated(file="glm47-flash/lora_fsdp.yaml", gib=43, at="glm47-flash/README.md:31", gpu="L40S", gpus=2),
    Stated(file="gpt-oss/gpt-oss-20b-sft-lora-singlegpu.yaml", gib=44, at="gpt-oss/README.md:23", gpu="L40S"),
    Stated(file="gpt-oss/gpt-oss-20b-fft-fsdp2-offload.yaml", gib=21, at="gpt-oss/README.md:26", gpu="A10", gpus=2),
    Stated(file="gpt-oss/gpt-oss-20b-fft-fsdp2.yaml", gib=46, at="gpt-oss/README.md:29", gpus=4),
    Stated(file="gpt-oss/gpt-oss-120b-fft-fsdp2-offload.yaml", gib=49, at="gpt-oss/README.md:41", gpus=8),
    Stated(file="granite4/granite-4.0-tiny-fft.yaml", gib=40.8, at="granite4/README.md:30"),
    Stated(file="hunyuan/hunyuan-v1-dense-qlora.yaml", gib=4.7, at="hunyuan/README.md:28"),
    Stated(file="kimi-linear/kimi-48b-lora.yaml", gib=98.7, at="kimi-linear/README.md:21", gpu="H200"),
    Stated(file="magistral/magistral-small-qlora.yaml", gib=24, at="magistral/README.md:32", model=_MISTRAL_SMALL),
    Stated(
        file="magistral/think/magistral-small-think-qlora.yaml",
        gib=19.1,
        at="magistral/think/README.md:19",
        model=_MISTRAL_SMALL,
    ),
    Stated(file="mimo/mimo-7b-qlora.yaml", gib=17.2, at="mimo/README.md:17"),
    Stated(file="ministral/ministral-small-qlora.yaml", gib=8.76, at="ministral/README.md:17"),
    Stated(file="ministral3/think/ministral3-3b-think-qlora.yaml", gib=4.76, at="ministral3/think/README.md:19"),
    Stated(file="olmo3/olmo3-7b-qlora.yaml", gib=11.3, at="olmo3/README.md:19"),
    Stated(file="plano/plano-4b-qlora.yaml", gib=5.1, at="plano/README.md:19"),
    Stated(file="qwen3-next/qwen3-next-80b-a3b-qlora.yaml", gib=47, at="qwen3-next/README.md:21"),
    Stated(file="seed-oss/seed-oss-36b-qlora.yaml", gib=27.7, at="seed-oss/README.md:26"),
    Stated(file="trinity/trinity-nano-preview-qlora.yaml", gib=24.9, at="trinity/README.md:19"),
    Stated(file="voxtral/voxtral-mini-qlora.yml", gib=4.8, at="voxtral/README.md:46"),
)


def check(folder: Path, stated: Stated) -> dict[str, Any]:
    """Return a config's row: the model that is counted, GiB that nvidia-smi would show and the bound, or why none."""
    row: dict[str, Any] = asdict(stated)
    try:
        checked = check_files(
            [folder / stated.file], hardware={"gpu": stated.gpu, "gpus": stated.gpus}, model=stated.model
        )
    except DsplanError as error:
        return row | {"why": str(error).removeprefix(str(folder)).partition(": ")[2]}
    request, plan = checked.audit.request, checked.audit.plan
    if request is None or plan is None:
        return row | {"why": checked.audit.why.partition(";")[0]}
    memory = plan.memory
    row |= {"counted": request.facts.name, "length": plan.configuration.sequence_length}
    return row | {"used": memory.device_used_bytes / GIB, "upper": memory.device_used_upper_bytes / GIB}


def read_results() -> list[dict[str, Any]]:
    """Return the rows of the last run."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return rows


def main() -> None:
    """Check every config and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    folder = parser.parse_args().directory / PROJECT.replace("/", "+") / "examples"
    rows = [check(folder, stated) for stated in STATED]
    replace_text(RESULTS, json.dumps(rows, indent=1, sort_keys=True) + "\n")
    for row in rows:
        print(row["file"], row["gib"], row.get("why") or f"{row['used']:.1f} {row['upper']:.1f} {row['counted']}")


if __name__ == "__main__":
    main()
