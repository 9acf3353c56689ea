"""What is right: transformers' own forward, one sequence at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers


@lru_cache(maxsize=4)
def load(path: str, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def states(path: str, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[T, N + 2, H]: boundaries 0..N, then ``norm``. Boundary N comes from a hook on the last layer."""
    model = load(path, dtype)
    decoder = model.get_decoder()
    n = model.config.get_text_config().num_hidden_layers
    layers = next(m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n)
    seen: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    def note_input(module: Any, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    hooks = [
        layers[-1].register_forward_hook(note),
        layers[0].register_forward_pre_hook(note_input, with_kwargs=True),
    ]
    try:
        out = decoder(input_ids=torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    reported = list(out.hidden_states)
    if not torch.equal(reported[0], inputs[0]):
        reported = [inputs[0], *reported[:-1]]  # a model that reports each layer's output
        assert torch.equal(reported[-1], seen[0]) or len(reported) == n + 1
        reported = [*reported[:n], out[0]]
    assert len(reported) == n + 1
    return torch.stack([*reported[:n], seen[0], out[0]], dim=2)[0]


def difference(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Relative difference of two states [T, H]."""
    a, b = ours.double(), right.double()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30))


def assert_states(ours: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Every boundary of ``ours`` [T, L, H] is within the tolerance."""
    assert ours.shape == right.shape, f"{tuple(ours.shape)} rows, not {tuple(right.shape)}"
    for column in range(ours.shape[1]):
        d = difference(ours[:, column], right[:, column])
        assert d < tolerance, f"column {column}: relative difference {d:.1e}"
