"""Writes down what torchrun told this rank."""

import json
import os
import sys
from pathlib import Path

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
answer = {"arguments": sys.argv[1:], **{name: int(os.environ[name]) for name in names}}
Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(answer))
