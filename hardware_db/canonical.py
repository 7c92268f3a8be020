"""One spelling of a JSON value, so that equal values have equal text and equal hashes."""

from __future__ import annotations

import hashlib
import json


def canonical_json(value: object) -> str:
    """`value` as ASCII JSON with sorted keys and no spaces; NaN and infinities raise ValueError, being no JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object, length: int) -> str:
    """The first `length` hexadecimal digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]
