"""How much memory a full step needs beside the weights, measured on the device."""

from __future__ import annotations

import torch

from layertap.engine.memory import format_bytes
from layertap.engine.self_check import make_layout
from layertap.engine.verifier import Verifier
from layertap.errors import InvalidInputError


@torch.inference_mode()
def measure_step(verifier: Verifier, num_tokens: int) -> int:
    """Bytes that a step of ``num_tokens`` tokens needs at its peak, beside weights and caches.

    Raises:
        InvalidInputError: the device's memory does not suffice for one step.
    """
    device = verifier.device
    length = min(num_tokens, verifier.max_model_len)
    lengths = [length] * (num_tokens // length)
    total = sum(lengths)
    ids = torch.zeros(total, dtype=torch.long, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        if verifier.packed:
            verifier.allocate(total)
            with_caches = torch.cuda.memory_allocated(device)
            slots = torch.split(torch.arange(total, device=device), lengths)
            layout = make_layout(list(slots), [0] * len(lengths), lengths)
            verifier.forward_packed(ids, positions, layout, None)
        else:
            with_caches = before
            verifier.forward_alone(ids[:length], None, 0, want_logits=False, keep_state=False)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as e:
        free, size = torch.cuda.mem_get_info(device)
        raise InvalidInputError(
            "max_num_batched_tokens",
            num_tokens,
            f"a step that fits: of {format_bytes(size)}, {format_bytes(free)} are free after the model "
            f"({format_bytes(before)}); lower it or use a larger GPU",
        ) from e
    finally:
        for layer in verifier.attention:
            layer.key_cache = layer.value_cache = None
    peak = torch.cuda.max_memory_allocated(device) - with_caches
    torch.cuda.empty_cache()
    return int(peak)
