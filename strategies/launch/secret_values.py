"""Secrets of a launch, which are not to leave the machine: variables, and arguments of script and launcher. No torch.

What a secret is, names say: `HF_TOKEN`, `--api-key`, `password=`. Beside those, passwords in addresses count, and the
values of this process's own secret variables wherever they turn up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardware_db.errors import DsplanError
from strategies.run_directory.spec import LaunchSpec

LEFT_OUT = "<a secret, left out>"
"""In the place of each."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PAIR = re.compile(r"([\w.-]+)=([^\s,;]+)")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]+(?=@)")
_SECRET_WORDS = frozenset({"secret", "password", "passwd", "passphrase", "apikey", "credential", "credentials"})
_SECRET_KEYS = frozenset({"api", "access", "private", "account", "secret", "encryption", "license"})
"""Words before `key` that make it one."""
_PLAIN_TOKENS = frozenset(
    {"audio", "bos", "class", "cls", "end", "eos", "image", "mask", "max", "new", "next", "num", "pad", "per", "sep"}
    | {"special", "start", "stop", "unk", "video", "vision"}
)
"""Words before `token` that make it one of a vocabulary."""
_LEAST_LETTERS = 8
"""Of a value that is looked for in texts: a shorter one would be met by chance."""


def is_secret(name: str) -> bool:
    """Return whether a variable or a flag of this name holds a secret, as far as names say."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words[-1:] in (["file"], ["path"], ["dir"]):
        return False
    pairs = list(zip(["", *words], words, strict=False))
    keys = any(word == "key" and before in _SECRET_KEYS for before, word in pairs)
    tokens = any(word == "token" and before not in _PLAIN_TOKENS for before, word in pairs)
    return keys or tokens or not _SECRET_WORDS.isdisjoint(words)


def without_values(text: str) -> str:
    """Return a text, or one as JSON has it, without the values of this process's secret variables."""
    for secret in _secret_values(os.environ):
        for spelled in (secret, json.dumps(secret)[1:-1]):
            text = text.replace(spelled, LEFT_OUT)
    return text


def _secret_values(variables: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables, the longest first."""
    values = {value for name, value in variables.items() if is_secret(name) and len(value) >= _LEAST_LETTERS}
    return sorted(values, key=len, reverse=True)


def without_secrets(spec: LaunchSpec) -> LaunchSpec:
    """Return a launch with `LEFT_OUT` for each secret."""
    return replace(
        spec,
        arguments=_arguments_without(spec.arguments),
        environment=_variables_without(spec.environment),
        placement=replace(spec.placement, options=_arguments_without(spec.placement.options)),
        start=replace(spec.start, variables=_variables_without(spec.start.variables)),
    )


def _variables_without(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: LEFT_OUT if is_secret(name) else _IN_ADDRESS.sub(LEFT_OUT, value) for name, value in variables.items()
    }


def _arguments_without(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return arguments without the values of `--api-key VALUE`, `--api-key=VALUE` and `api_key=VALUE`."""
    kept, follows_secret = [], False
    for word in arguments:
        is_flag = word.startswith("-")
        text = _PAIR.sub(lambda pair: f"{pair[1]}={LEFT_OUT}" if is_secret(pair[1]) else pair[0], word)
        kept.append(LEFT_OUT if follows_secret and not is_flag else _IN_ADDRESS.sub(LEFT_OUT, text))
        follows_secret = is_flag and "=" not in word and is_secret(word)
    return tuple(kept)


def with_secrets(spec: LaunchSpec, run: object, *, has_script: bool, has_options: bool) -> LaunchSpec:
    """Return a launch whose secret variables are this process's; `run` is what people know it by.

    `has_script` and `has_options` say that script and arguments, or options for the launcher, are named anew.

    Raises:
        DsplanError: one is not set here, or arguments had a secret.
    """
    names = [name for name, value in spec.start.variables.items() if LEFT_OUT in value]
    missing = [name for name in names if name not in os.environ]
    why = "which is not kept in a store"
    if missing and not has_script:
        raise DsplanError(f"{run}: the run had {', '.join(missing)} set, {why}; set it here, and resume again")
    if any(LEFT_OUT in word for word in spec.arguments) and not has_script:
        again = f"dsplan run --resume {run} SCRIPT ARGUMENTS"
        raise DsplanError(f"{run}: the script's arguments had a secret, {why}; name them again: {again}")
    if any(LEFT_OUT in word for word in spec.placement.options) and not has_options:
        raise DsplanError(f"{run}: --launcher-option had a secret, {why}; give all of these options again")

    def filled(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: os.environ.get(name, value) if LEFT_OUT in value else value for name, value in variables.items()}

    start = replace(spec.start, variables=filled(spec.start.variables))
    return replace(spec, environment=filled(spec.environment), start=start)
