"""NVML's numbers as words, as nvml.h gives them: event reasons, topology levels, P2P status, nvmlReturn_t."""

from __future__ import annotations

# Bit 0x1 (idle) is left out: an idle GPU is not held back.
THROTTLE_REASONS = {
    0x2: "clocks set by the user",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "low utilisation or reliability voltage",
}

ANCESTORS = {
    0: "internal",
    10: "pcie-switch",
    20: "pcie-switches",
    30: "host-bridge",
    40: "numa-node",
    50: "system",
}

P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled in the driver's settings",
    5: "not supported",
    6: "unknown",
}

NOT_SUPPORTED = 3
INVALID_ARGUMENT = 2
NOT_FOUND = 6
LOST = frozenset({15, 16, 28})

ERRORS = {
    3: "this GPU or driver does not support it",
    4: "this user has no permission",
    6: "there is none",
    8: "its power cables are not attached",
    10: "the driver did not answer in time",
    13: "this driver is too old to say",
    14: "its inforom is damaged",
    15: "the GPU has fallen off the bus; reboot the machine",
    16: "the GPU needs a reset; run `nvidia-smi --gpu-reset` or reboot",
    17: "the operating system refused",
    27: "the GPU is not ready",
    28: "the GPU cannot be found; reboot the machine",
    999: "the driver answered 'unknown error'",
}

INIT_ERRORS = {
    9: "the NVIDIA driver is installed but not loaded; load it with `modprobe nvidia`",
    12: "no NVIDIA driver here",
    18: "the NVIDIA driver was updated while loaded; reboot the machine",
}


def throttle_words(reasons: int) -> tuple[str, ...]:
    """The reasons in a bit mask as words, empty when the clocks are free."""
    return tuple(word for bit, word in THROTTLE_REASONS.items() if reasons & bit)
