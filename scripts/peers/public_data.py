"""Makes here what public training scripts ask of the Hub: text, tokenizers, small models and data sets.

Nothing is downloaded. The text is the sources of Python's standard library, the weights are random, and every folder
has the name that a script looks for (`bert-base-cased`, `nyu-mll/glue`), so that it is found beside the script.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

_VOCABULARY = 1000
_DEMO_WINDOWS = 4242
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")
_CHAT = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def prepare(directory: Path) -> None:
    """Make every folder and file that the scripts look for below `directory`, with the same content each time."""
    lines = list(_lines())
    text = "\n".join(lines)
    (directory / "text.txt").write_text(text[:200_000])
    (directory / "text-val.txt").write_text(text[200_000:220_000])
    (directory / "data").mkdir(exist_ok=True)
    (directory / "data/wikitext-2.txt").write_text("\n".join(_windows(lines)))
    tokenizer = _tokenizer(directory, text)
    _models(directory, tokenizer)
    draw = random.Random(0)
    _glue(directory / "nyu-mll/glue", lines, draw)
    for metric in ("glue", "accuracy"):
        (directory / metric).mkdir(exist_ok=True)
        (directory / metric / f"{metric}.py").write_text(_METRIC)
    _instructions(directory, lines, draw)
    _documents(directory, lines)


def _lines() -> Iterator[str]:
    """Return the lines of the standard library's modules that say something."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
        for line in path.read_text(errors="replace").splitlines():
            if len(line.split()) > 3:
                yield line.strip()


def _windows(lines: list[str]) -> Iterator[str]:
    """Lines of 4,240 windows of Lightning's demo, which keeps 4,000 from training; few enough words for a CPU."""
    tokens = 0
    for line in itertools.cycle(lines[:400]):
        if tokens >= _DEMO_WINDOWS * 35:
            return
        tokens += len(line.split()) + 1  # the demo ends each line with a token
        yield line


def _tokenizer(directory: Path, text: str) -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text[:400_000]], vocab_size=_VOCABULARY, special_tokens=list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=128,
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(directory / "tokenizer")
    return tokenizer


def _models(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    size = len(tokenizer)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    gpt2 = GPT2Config(vocab_size=size, n_positions=128, n_embd=64, n_layer=2, n_head=2, **ids)
    llama = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        **ids,
    )
    bert = BertConfig(
        vocab_size=size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )
    models = {
        "tiny-gpt2": GPT2LMHeadModel(gpt2),
        "tiny-llama": LlamaForCausalLM(llama),
        "bert-base-cased": BertForSequenceClassification(bert),
        "roberta-base": BertForMaskedLM(bert),
    }
    for name, model in models.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def _glue(folder: Path, lines: list[str], draw: random.Random) -> None:
    """Pairs of lines that are or are not the same, as `load_dataset("nyu-mll/glue", "mrpc")` gives them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 160), ("validation", 32), ("test", 32)):
        with (folder / f"{split}.csv").open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(("sentence1", "sentence2", "label", "idx"))
            for index in range(count):
                first, other = draw.choice(lines)[:80], draw.choice(lines)[:80]
                rows.writerow((first, first if index % 2 else other, index % 2, index))
    splits = "".join(f"  - split: {split}\n    path: {split}.csv\n" for split in ("train", "validation", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n")


# Found by `evaluate.load("glue", "mrpc")` and `evaluate.load("accuracy")`, whose own code comes from the Hub.
_METRIC = '''"""Accuracy."""
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(guess == truth) for guess, truth in zip(predictions, references))
        return {"accuracy": right / len(references)}
'''


def _instructions(directory: Path, lines: list[str], draw: random.Random) -> None:
    """Instructions with answers: for alpaca's script, and as TRL's SFT and DPO read them."""
    alpaca, chats, preferences = [], [], []
    for _ in range(160):
        instruction, answer, worse = (draw.choice(lines)[:80] for _ in range(3))
        alpaca.append({"instruction": instruction, "input": "", "output": answer})
        question = {"role": "user", "content": instruction}
        chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
        preferences.append(
            {
                "prompt": [question],
                "chosen": [{"role": "assistant", "content": answer}],
                "rejected": [{"role": "assistant", "content": worse}],
            }
        )
    (directory / "alpaca.json").write_text(json.dumps(alpaca))
    (directory / "instructions").mkdir(exist_ok=True)
    (directory / "instructions/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alpaca))
    for name, rows in (("chats", chats), ("preferences", preferences)):
        folder = directory / name
        folder.mkdir(exist_ok=True)
        for split, part in (("train", rows[:128]), ("test", rows[128:])):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def _documents(directory: Path, lines: list[str]) -> None:
    """Texts as HelloDeepSpeed reads them (`load_dataset("wikitext", "wikitext-2-v1")`), and shards of nanochat."""
    wikitext = directory / "wikitext"
    wikitext.mkdir(exist_ok=True)
    (wikitext / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[:2000]))
    header = "configs:\n- config_name: wikitext-2-v1\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    (wikitext / "README.md").write_text(f"---\n{header}---\n")
    shards = directory / "nanochat/base_data_climbmix"
    shards.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]
    for shard, part in enumerate((texts[:-40], texts[-40:])):
        parquet.write_table(pyarrow.table({"text": part}), shards / f"shard_{shard:05d}.parquet", row_group_size=20)
