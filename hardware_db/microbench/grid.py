"""The points that micro-benchmarks measure, the rate of each, and which points a machine is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import RateMeasurement, new_id, utc_now
from hardware_db.records import dataclass
from hardware_db.units import KIB, MIB

# The points that a benchmark measures.


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """`operation` on tensors of `dtype` with `size` bytes or of `shape`, while `ranks` processes do the same.

    The fields mean what they mean in `hardware_db.measurement.RateMeasurement`; two equal points are the same
    measurement. `size` is 0 where the operation has none.
    """

    operation: str
    dtype: str = ""
    size: int = 0
    shape: tuple[int, ...] = ()
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """`point` ran at `value` `unit`, the median of `repeats` samples that differ by up to `spread` (max / min - 1)."""

    point: Point
    value: float
    unit: str
    repeats: int = 1
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Reason why a point cannot be measured here, in one line."""

    reason: str


def as_measurement(rate: Rate, fingerprint: Fingerprint, source: str) -> RateMeasurement:
    """Return the record of a rate that was measured just now."""
    point = rate.point
    return RateMeasurement(
        id=new_id(),
        created_at=utc_now(),
        operation=point.operation,
        value=rate.value,
        unit=rate.unit,
        dtype=point.dtype,
        size=point.size or None,
        shape=point.shape,
        ranks=point.ranks,
        repeats=rate.repeats,
        spread=rate.spread,
        fingerprint=fingerprint,
        source=source,
    )


def point_of(record: RateMeasurement) -> Point:
    """Return the point that a record measured."""
    return Point(
        operation=record.operation, dtype=record.dtype, size=record.size or 0, shape=record.shape, ranks=record.ranks
    )


COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "point_to_point"),
)
_FREQUENT = COLLECTIVES[:3]
HOST_LINKS = ("host_to_device", "device_to_host", "host_to_device_pageable", "device_to_host_pageable")
KINDS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul", "matmul_backward"),
    "attention": ("attention", "attention_backward"),
    "memory": ("memory", "clone", "elementwise", "dropout", "launch"),
    "host-link": HOST_LINKS,
    "collectives": ("barrier", "all_reduce_latency", *COLLECTIVES),
    "optimizer": ("cpu_adamw", "cpu_adamw_fused"),
    "disk": ("disk_write", "disk_read"),
}
"""Operations by the word that `dsplan bench --only` knows them by."""

OPERATIONS = tuple(name for names in KINDS.values() for name in names)
_EXTENTS = {"matmul": 3, "matmul_backward": 3, "attention": 4, "attention_backward": 4}
_DTYPES = ("fp32", "bf16", "fp16")
_TYPED = (*_EXTENTS, *COLLECTIVES, "elementwise")
_SIZELESS = (*_EXTENTS, "barrier", "launch")


def unmeasurable(point: Point) -> str:
    """Return why nothing can measure this point, in a few words; empty where something can."""
    name, extents = point.operation, _EXTENTS.get(point.operation, 0)
    if name not in OPERATIONS:
        return f"names no operation: {name!r}; use one of {', '.join(OPERATIONS)}"
    if len(point.shape) != extents:
        return f"needs a shape of {extents} extents" if extents else f"has a shape, and {name} has none"
    if name not in _SIZELESS and not point.size:
        return "needs a size in bytes"
    if name in _TYPED and point.dtype not in _DTYPES:
        return f"needs a dtype: {', '.join(_DTYPES)}"
    return "needs at least 2 ranks" if name in KINDS["collectives"] and point.ranks < 2 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The sizes of a transformer's layers that decide its products: widths, heads and their width, tokens at once."""

    hidden: int
    intermediate: int
    heads: int
    head_width: int
    vocabulary: int
    length: int
    samples: int = 1

    @property
    def products(self) -> Iterator[tuple[int, int, int]]:
        """Shapes (m, k, n) of attention's projections, of the feed-forward layer, and of the head."""
        tokens, width = self.samples * self.length, self.heads * self.head_width
        yield tokens, self.hidden, width
        yield tokens, self.hidden, self.intermediate
        yield tokens, self.intermediate, self.hidden
        yield tokens, self.hidden, self.vocabulary

    @property
    def attention(self) -> tuple[int, int, int, int]:
        """Samples, heads, length and width of a head."""
        return self.samples, self.heads, self.length, self.head_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes that fit a kind of device: largest product (FLOP) and tensor (bytes), widths and dtypes to try."""

    gpu: bool
    dtypes: tuple[str, ...]
    blocks: tuple[Block, ...]
    most_operations: float
    sizes: tuple[int, ...]
    quick_edge: int
    quick_memory: int

    @property
    def compute_dtypes(self) -> tuple[str, ...]:
        """Those with a curve of their own: fp16 runs on the units of bf16."""
        return tuple(dtype for dtype in self.dtypes if dtype != "fp16")


def _block(hidden: int, length: int, samples: int = 1, head_width: int = 64) -> Block:
    """Return a plain transformer's block: a feed-forward layer four times as wide."""
    return Block(
        hidden=hidden,
        intermediate=4 * hidden,
        heads=hidden // head_width,
        head_width=head_width,
        vocabulary=8 * hidden,
        length=length,
        samples=samples,
    )


CPU = Scale(
    gpu=False,
    dtypes=("fp32", "bf16"),
    blocks=(
        *(_block(256, 128, samples) for samples in (1, 4)),
        *(_block(512, 256, samples) for samples in (1, 4)),
        _block(128, 512),
        _block(1024, 256),
    ),
    most_operations=4e9,
    sizes=tuple(KIB << shift for shift in range(0, 17, 2)),
    quick_edge=512,
    quick_memory=64 * MIB,
)
GPU = Scale(
    gpu=True,
    dtypes=("bf16", "fp16", "fp32"),
    blocks=(
        _block(1024, 512, 2),
        _block(2048, 1024, 2),
        _block(4096, 2048, 1, head_width=128),
        _block(4096, 2048, 4, head_width=128),
        _block(8192, 2048, 1, head_width=128),
        _block(768, 1024, 8),
    ),
    most_operations=2e13,
    sizes=tuple(KIB << shift for shift in range(0, 21, 2)),
    quick_edge=4096,
    quick_memory=256 * MIB,
)


def quick_points(scale: Scale, ranks: int) -> tuple[Point, ...]:
    """Return the few rates that a first plan on a machine needs; two to three seconds of work."""
    edge = (scale.quick_edge,) * 3
    points = [Point(operation="matmul", dtype=dtype, shape=edge, ranks=ranks) for dtype in scale.dtypes]
    points.append(Point(operation="memory", size=scale.quick_memory, ranks=ranks))
    points.append(Point(operation="cpu_adamw", dtype="fp32", size=8 * MIB, ranks=ranks))
    if scale.gpu:
        points.append(Point(operation="host_to_device", size=64 * MIB, ranks=ranks))
    if ranks > 1:
        points.append(Point(operation="all_reduce_latency", dtype="fp32", size=4, ranks=ranks))
        points.append(Point(operation="all_reduce", dtype="fp32", size=16 * MIB, ranks=ranks))
    if ranks > 1 and not scale.gpu:
        # Over gloo these are no halves of an all-reduce, and what they fill is memory just allocated.
        points += [Point(operation=name, dtype="fp32", size=4 * MIB, ranks=ranks) for name in COLLECTIVES[1:3]]
        points.append(Point(operation="clone", size=64 * MIB, ranks=ranks))
    return tuple(points)


def all_points(scale: Scale, ranks: int, blocks: Iterable[Block] = ()) -> tuple[Point, ...]:
    """Every point, those of `quick_points` first.

    With `blocks`, products and attention of these alone, the products up to ten times as large.
    """
    chosen = tuple(blocks)
    most = scale.most_operations * (10 if chosen else 1)
    points = [*quick_points(scale, ranks), *_transfers(scale, ranks)]
    points += _products(scale, chosen or scale.blocks, ranks, most)
    points += _attention(scale, chosen or scale.blocks, ranks)
    points += [Point(operation=name, size=64 * MIB, ranks=ranks) for name in KINDS["disk"]]
    return tuple(dict.fromkeys(points))


def _products(scale: Scale, blocks: Iterable[Block], ranks: int, most_operations: float) -> Iterator[Point]:
    shapes = dict.fromkeys(shape for block in blocks for shape in block.products)
    for m, k, n in shapes:
        if 2 * m * k * n <= most_operations:
            for dtype in scale.compute_dtypes:
                yield Point(operation="matmul", dtype=dtype, shape=(m, k, n), ranks=ranks)
                yield Point(operation="matmul_backward", dtype=dtype, shape=(m, k, n), ranks=ranks)


def _attention(scale: Scale, blocks: Iterable[Block], ranks: int) -> Iterator[Point]:
    for shape in dict.fromkeys(block.attention for block in blocks):
        for dtype in scale.compute_dtypes:
            yield Point(operation="attention", dtype=dtype, shape=shape, ranks=ranks)
            yield Point(operation="attention_backward", dtype=dtype, shape=shape, ranks=ranks)


def _transfers(scale: Scale, ranks: int) -> Iterator[Point]:
    """Return what moves bytes: between ranks, within the device, to the host, and through the optimizer."""
    if ranks > 1:
        yield from _collectives(scale, ranks)
    yield Point(operation="launch", ranks=ranks)
    for size in (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
        yield Point(operation="memory", size=size, ranks=ranks)
        if scale.gpu:
            yield from (Point(operation=name, size=size, ranks=ranks) for name in HOST_LINKS)
    if not scale.gpu:
        yield from (Point(operation="clone", size=size, ranks=ranks) for size in (MIB, 16 * MIB, 64 * MIB))
        yield from (Point(operation="dropout", size=size, ranks=ranks) for size in (64 * KIB, 4 * MIB))
    for size in (256 * KIB, 4 * MIB, 64 * MIB):
        for dtype in scale.compute_dtypes:
            yield Point(operation="elementwise", dtype=dtype, size=size, ranks=ranks)
    for name in KINDS["optimizer"]:
        for size in (256 * KIB, 8 * MIB, 64 * MIB):
            yield Point(operation=name, dtype="fp32", size=size, ranks=ranks)


def _collectives(scale: Scale, ranks: int) -> Iterator[Point]:
    """Those that sharded training is made of at every size and in bf16 too, the others at every second size."""
    yield Point(operation="barrier", ranks=ranks)
    for name in COLLECTIVES:
        for size in scale.sizes if name in _FREQUENT else scale.sizes[::2]:
            yield Point(operation=name, dtype="fp32", size=size, ranks=ranks)
    for name in _FREQUENT:
        for size in scale.sizes[2::2]:
            yield Point(operation=name, dtype="bf16", size=size, ranks=ranks)
