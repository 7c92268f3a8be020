"""Functions that the tests of the device run on a card."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import torch

MIB = 1 << 20


def reserved_for(sizes: list[int]) -> list[tuple[int, int]]:
    """Bytes allocated and reserved after tensors of these bytes, each alone on an empty card."""
    answers = []
    for size in sizes:
        torch.cuda.empty_cache()
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        answers.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        del tensor
    torch.cuda.empty_cache()
    return answers


def story_of_blocks() -> dict[str, Any]:
    """Return what splitting, merging and reuse leave."""
    answers: dict[str, Any] = {}
    torch.cuda.empty_cache()
    first = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    second = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    answers["two of a segment"] = torch.cuda.memory_reserved()
    answers["beside"] = second.data_ptr() - first.data_ptr()
    address = first.data_ptr()
    del first
    torch.cuda.empty_cache()
    answers["a segment in use stays"] = torch.cuda.memory_reserved()
    smaller = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    answers["the freed one is used again"] = smaller.data_ptr() == address
    del smaller, second
    whole = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
    answers["merged"] = (whole.data_ptr() == address, torch.cuda.memory_reserved())
    exact = torch.empty(10 * MIB - 1024, dtype=torch.uint8, device="cuda")
    answers["a remainder of over a MiB is split off"] = torch.cuda.memory_reserved()
    del whole, exact
    torch.cuda.empty_cache()
    answers["empty"] = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    return answers


def history_of_blocks(events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bytes allocated and reserved after each event: a tensor of so many bytes under a number, or 0 to free it."""
    torch.cuda.empty_cache()
    tensors, answers = {}, []
    for number, size in events:
        if size:
            tensors[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            del tensors[number]
        answers.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    tensors.clear()
    torch.cuda.empty_cache()
    return answers


def running_out() -> dict[str, Any]:
    """Return what an overflow says, and whether the card can be used after it."""
    answers: dict[str, Any] = {}
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    kept = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    cached = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    del cached  # has to be given back before the next fits
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    again = torch.empty(total // 4 + 2 * MIB, dtype=torch.uint8, device="cuda")
    answers["retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    try:
        torch.empty(total, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        answers["text"] = str(error)
    del kept, again
    answers["sum"] = torch.ones(1000, device="cuda").sum().item()
    torch.cuda.set_per_process_memory_fraction(0.25)
    torch.cuda.empty_cache()
    try:
        torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        answers["limited"] = str(error)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return answers


def expandable() -> dict[str, Any]:
    """Return how a segment grows and is given back with `expandable_segments`."""
    answers: dict[str, Any] = {}
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        first = torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
        answers["first"] = torch.cuda.memory_reserved() // MIB
        second = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        answers["second"] = torch.cuda.memory_reserved() // MIB
        answers["beside"] = second.data_ptr() - first.data_ptr() == 12 * MIB
        second.fill_(3)
        del first
        torch.cuda.empty_cache()
        answers["its middle stays"] = torch.cuda.memory_reserved() // MIB
        answers["numbers stay"] = int(second.sum().item()) == 3 * 30 * MIB
        del second
        torch.cuda.empty_cache()
        answers["empty"] = torch.cuda.memory_reserved()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return answers


def reuse_after_another_stream(records: bool) -> bool:
    """Return whether a block that another stream still reads is handed out again."""
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy = tensor + 1
    if records:
        tensor.record_stream(stream)
    del tensor
    again = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    same = again.data_ptr() == address
    torch.cuda.synchronize()
    del copy, again
    return same


def error_of(function: Callable[[], Any]) -> str:
    """Its message, or nothing."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()
        gc.collect()
    return ""


def streams_and_copies() -> dict[str, Any]:
    """Return what is seen of work on other streams and of copies, before and after it is waited for."""
    answers: dict[str, Any] = {}
    stream = torch.cuda.Stream()
    values = torch.arange(1000, device="cuda")

    def unwaited() -> None:
        with torch.cuda.stream(stream):
            values.sum()

    answers["read too soon"] = error_of(unwaited)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        doubled = values * 2
    answers["used too soon"] = error_of(lambda: doubled.sum())
    event = torch.cuda.Event()
    late = torch.cuda.Event()
    answers["fresh event"] = late.query()
    with torch.cuda.stream(stream):
        doubled = doubled + 1
        late.record()
        event.record()
    answers["not done at once"] = late.query()
    torch.cuda.current_stream().wait_event(event)
    answers["sum"] = int(doubled.sum().item())
    answers["done"] = late.query()

    pinned = torch.ones(4).pin_memory()
    copied = pinned.to("cuda", non_blocking=True)
    pinned.fill_(9.0)
    answers["a source that changes under way"] = copied.tolist()
    target = torch.zeros(4).pin_memory()
    target.copy_(copied, non_blocking=True)
    answers["not there yet"] = bool(target.isnan().all())
    torch.cuda.current_stream().synchronize()
    answers["there"] = target.tolist()
    pageable = torch.zeros(4)
    pageable.copy_(copied, non_blocking=True)
    answers["pageable"] = pageable.tolist()
    answers["other device"] = copied.to("cuda:1").device.index
    return answers


def mixed_devices() -> list[str]:
    """Errors of operations over two devices."""
    card, host = torch.ones(3, device="cuda"), torch.ones(3)
    other = torch.ones(3, device="cuda:1")
    return [
        error_of(lambda: card + host),
        error_of(lambda: card + other),
        error_of(lambda: torch.nn.functional.linear(card, torch.ones(3, 3))),
        error_of(lambda: card[torch.tensor([0, 1])] * torch.tensor(2.0)),
    ]


def random_numbers() -> dict[str, Any]:
    """Return what seeds, states and the CPU's own generator do."""
    torch.manual_seed(3)
    host = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    dropped = torch.nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    torch.cuda.set_rng_state(state)
    own = torch.Generator("cuda").manual_seed(5)
    again = torch.rand(4, device="cuda", generator=own)
    return {
        "state bytes": state.numel(),
        "repeats": torch.equal(second, torch.rand(4, device="cuda")),
        "moves on": not torch.equal(first, second),
        "the host's is untouched": torch.equal(host, torch.rand(4)),
        "dropped": int((dropped == 0).sum().item()),
        "own": torch.equal(again, torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(5))),
    }


def loading() -> list[str]:
    """Devices of what was saved on a card and read again."""
    from safetensors.torch import load, save

    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, device="cuda:1")}, buffer)
    devices = []
    for device in (None, "cpu", "cuda:0"):
        buffer.seek(0)
        devices.append(str(torch.load(buffer, map_location=device)["a"].device))
    devices.append(str({k: v.to("cuda") for k, v in load(save({"a": torch.ones(3)})).items()}["a"].device))
    return devices


def losses(device: str, mode: str) -> list[float]:
    """Six steps of a small transformer block; what `mode` says is used."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    head = torch.nn.Linear(32, 11)
    model = torch.nn.ModuleList([block, head]).to(device)
    options = {"foreach": mode == "foreach", "fused": mode == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 11, (6, 4, 16), generator=generator)
    table = torch.randn(11, 32, generator=generator).to(device)
    values = []
    for text in texts.to(device):
        context = torch.autocast(device, torch.bfloat16, enabled=mode == "autocast")
        with context:
            hidden = block(table[text])
            loss = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1).float(), text.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def attention(device: str, dtype_name: str, masked: bool) -> list[Any]:
    """Output and gradients of attention with fewer heads of keys than of queries."""
    generator = torch.Generator().manual_seed(2)
    dtype = getattr(torch, dtype_name)
    q, k, v = (torch.randn(2, heads, 24, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    if masked:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    mask = torch.randn(2, 1, 24, 24, generator=generator).to(device, dtype) if masked else None
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, enable_gqa=not masked)
    out.float().square().sum().backward()
    grads = [tensor.grad for tensor in (q, k, v)]
    return [type(out.grad_fn).__name__, *(t.float().detach().cpu().numpy() for t in (out, *grads) if t is not None)]


def collectives(device: str) -> list[Any]:
    """The result of every collective, with the rank's own values."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    def values(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=torch.float32) + 10.0 * rank).view(shape).to(device)

    answers: list[Any] = []
    summed, mean = values(4), values(4)
    dist.all_reduce(summed)
    dist.all_reduce(mean, dist.ReduceOp.AVG if device == "cuda" else dist.ReduceOp.SUM)
    answers += [summed, mean if device == "cuda" else mean / size]
    sent = values(3) if rank == 0 else torch.zeros(3, device=device)
    dist.broadcast(sent, 0)
    gathered = torch.empty(size * 3, device=device)
    dist.all_gather_into_tensor(gathered, values(3))
    listed = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(listed, values(3))
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, values(2 * size))
    exchanged = torch.empty(2 * size, device=device)
    dist.all_to_all_single(exchanged, values(2 * size))
    flags = torch.tensor([rank == 0], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    peer = (rank + 1) % size
    received = torch.empty(2, device=device)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values(2), peer), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    )
    for one in work:
        one.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    under_way = values(4)
    handle = dist.all_reduce(under_way, async_op=True)
    handle.wait()
    dist.barrier()
    answers += [sent, gathered, *listed, part, exchanged, received, under_way]
    return [tensor.cpu().tolist() for tensor in answers] + [flags.cpu().tolist(), objects]


def read_before_wait() -> str:
    """Return what happens to whoever does not wait for a collective."""
    import torch.distributed as dist

    tensor = torch.ones(4, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    message = error_of(lambda: tensor.sum())
    work.wait()
    return message


def own_use() -> tuple[int, int]:
    """Bytes that all processes hold of card 0, before and after this rank takes 64 MiB of it."""
    import torch.distributed as dist

    torch.cuda.empty_cache()
    dist.barrier()
    free = torch.cuda.mem_get_info(0)[0]
    dist.barrier()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    dist.barrier()
    after = torch.cuda.mem_get_info(0)[0]
    dist.barrier()
    del kept
    torch.cuda.empty_cache()
    return free, after


def wide_products() -> list[tuple[str, float]]:
    """Types and errors of products whose sums are wider than what is multiplied."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(2, 8, 8, generator=generator, dtype=torch.bfloat16).cuda() for _ in range(2))
    added = torch.ones(2, 8, 8, device="cuda")
    into = torch.empty(8, 8, device="cuda")
    right = torch.bmm(a.float(), b.float())
    torch.addmm(added[0], a[0], b[0], torch.float32, out=into)
    products = [
        (torch.mm(a[0], b[0], out_dtype=torch.float32), right[0]),
        (torch.bmm(a, b, out_dtype=torch.float32), right),
        (torch.addmm(added[0], a[0], b[0], out_dtype=torch.float32), right[0] + 1),
        (torch.baddbmm(added, a, b, out_dtype=torch.float32), right + 1),
    ]
    return [(str(value.dtype), (value - expected).abs().max().item()) for value, expected in products]
