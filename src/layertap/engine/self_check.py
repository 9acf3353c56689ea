"""Right, or refused: a few tokens through the engine's path against the model's own plain forward, at start.

The plain forward runs each sequence by itself with the model's own code, its own ("eager") attention and
``output_hidden_states=True``; faster attention back ends of the library have ignored soft caps and sinks
before. The packed path runs the same tokens as a flat batch of two sequences of which one comes in two
chunks, so that positions, masks, cache reads and output selection all take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from layertap.engine.attention import IMPLEMENTATION, BatchLayout
from layertap.engine.plan import NotPacked, attention_implementation, set_attention_implementation
from layertap.engine.taps import Taps
from layertap.errors import UnsupportedModelError
from layertap.layers import NORM, LayerId

if TYPE_CHECKING:
    from layertap.engine.verifier import Verifier

# Largest relative difference that rounding explains: of a whole boundary in float32; of the median token in
# half
# precision, where a single token may be routed to another expert.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_LENGTHS = (11, 6)
_FIRST_CHUNK = 5


def _sequences(verifier: Verifier) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, verifier.vocab_size, (n,), generator=generator).to(verifier.device) for n in _LENGTHS
    ]


def _ids(verifier: Verifier) -> list[LayerId]:
    """Every boundary that a plain forward also shows: all but the one before the final norm."""
    return [*range(len(verifier.layers)), NORM]


def plain_states(
    verifier: Verifier, ids_T: torch.Tensor, implementation: str = "eager"
) -> list[torch.Tensor]:
    """The states that the model's own forward reports, as [T, H] for each id of :func:`_ids`.

    Raises:
        UnsupportedModelError: it reports none, or not one for each boundary.
    """
    with _no_hooks_left(verifier.decoder), attention_implementation(verifier.model, implementation):
        out = verifier.decoder(input_ids=ids_T[None], use_cache=False, output_hidden_states=True)
    states = getattr(out, "hidden_states", None)
    name = type(verifier.model).__name__
    expected = len(verifier.layers) + 1
    if states is None or len(states) != expected:
        raise UnsupportedModelError(
            f"{name} is refused: it reports {0 if states is None else len(states)} hidden states where "
            f"{expected} were expected, so nothing can be checked"
        )
    shape = (1, len(ids_T), verifier.hidden_size)
    for s in states:
        if tuple(s.shape) != shape:
            raise UnsupportedModelError(
                f"{name} is refused: a hidden state has shape {tuple(s.shape)}, not {shape}"
            )
    return [s[0] for s in (*states[:-1], out[0])]


@contextmanager
def _no_hooks_left(model: nn.Module) -> Iterator[None]:
    """Take away the hooks with which the library records hidden states: they would stay, and slow every
    forward."""
    before = {m: set(m._forward_hooks) for m in model.modules()}
    try:
        yield
    finally:
        for m, known in before.items():
            for key in [k for k in m._forward_hooks if k not in known]:
                m._forward_hooks.pop(key)
                m._forward_hooks_with_kwargs.pop(key, None)
                m._forward_hooks_always_called.pop(key, None)
            if getattr(m, "_output_capturing_hooks_installed", False):
                setattr(m, "_output_capturing_hooks_installed", False)  # noqa: B010 - a plain attribute


def difference(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Relative difference of two [T, H] states; in half precision the median over tokens. NaN counts as
    infinite."""
    a, b = ours.double(), plain.double()
    if plain.dtype in (torch.float32, torch.float64):
        value = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30)
    else:
        norms = torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)
        value = (torch.linalg.vector_norm(a - b, dim=-1) / norms).median()
    result = float(value)
    return float("inf") if result != result else result


def _tolerance(verifier: Verifier) -> float:
    return _TOLERANCE.get(verifier.dtype, 8e-2)


@torch.inference_mode()
def check_packed(verifier: Verifier, with_logits: bool) -> None:
    """Compare the packed path with the plain forward.

    Raises:
        NotPacked: they differ, or the packed path fails.
        UnsupportedModelError: there is nothing to compare with.
    """
    a, b = _sequences(verifier)
    plain = [plain_states(verifier, s) for s in (a, b)]
    if not all(bool(torch.isfinite(s).all()) for states in plain for s in states):
        # A model that yields NaN cannot be compared; its requests fail one by one.
        return
    rows: list[list[torch.Tensor]] = [[] for _ in _ids(verifier)]
    taps = Taps(verifier.decoder, verifier.layers, _ids(verifier), lambda c, h: rows[c].append(h.clone()))
    verifier.allocate(64)
    device = verifier.device
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).to(device)
    slots_a, slots_b = order[: len(a)], order[32 : 32 + len(b)]
    k = _FIRST_CHUNK
    try:
        with attention_implementation(verifier.model, IMPLEMENTATION):
            layout = make_layout([slots_a[:k]], [0], [k])
            verifier.forward_packed(a[:k], torch.arange(k, device=device), layout, None)
            layout = make_layout([slots_a, slots_b], [k, 0], [len(a) - k, len(b)])
            positions = torch.cat([torch.arange(k, len(a)), torch.arange(len(b))]).to(device)
            last = torch.tensor([len(a) - k - 1, len(a) - k + len(b) - 1], device=device)
            logits = verifier.forward_packed(
                torch.cat([a[k:], b]), positions, layout, last if with_logits else None
            )
    except Exception as e:
        raise NotPacked(f"a flat batch failed ({type(e).__name__}: {str(e)[:160]})") from e
    finally:
        taps.remove()
        for layer in verifier.attention:
            layer.key_cache = layer.value_cache = None
    for column, layer_id in enumerate(_ids(verifier)):
        ours = torch.cat(rows[column])
        parts = ((ours[: len(a)], plain[0][column]), (ours[len(a) :], plain[1][column]))
        for mine, theirs in parts:
            d = difference(mine, theirs)
            if not d <= _tolerance(verifier):
                raise NotPacked(
                    f"a flat batch gives other states at boundary {layer_id} (relative difference {d:.1e})"
                )
    if logits is not None:
        for i, s in enumerate((a, b)):
            d = difference(
                logits[i : i + 1], verifier.model(input_ids=s[None], use_cache=False).logits[0, -1:]
            )
            if not d <= _tolerance(verifier):
                raise NotPacked(f"a flat batch gives other logits (relative difference {d:.1e})")


def _sdpa_is_right(verifier: Verifier, ids_T: torch.Tensor, plain: list[torch.Tensor]) -> bool:
    """Whether the library's fused attention gives this model's states; it needs less memory than "eager"."""
    if not getattr(verifier.model, "_supports_sdpa", False):
        return False
    try:
        fused = plain_states(verifier, ids_T, "sdpa")
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return all(difference(f, p) <= _tolerance(verifier) for f, p in zip(fused, plain, strict=True))


@torch.inference_mode()
def check_alone(verifier: Verifier, with_logits: bool) -> bool:
    """Compare the taps of a sequence-by-sequence run with the plain forward.

    Returns:
        True if the model's own cache also gives the same states, token by token.

    Raises:
        UnsupportedModelError: the taps do not see what the model reports.
    """
    ids = _sequences(verifier)[0]
    plain = plain_states(verifier, ids)
    if not all(bool(torch.isfinite(s).all()) for s in plain):
        return False
    name = type(verifier.model).__name__
    if _sdpa_is_right(verifier, ids, plain):
        set_attention_implementation(verifier.model, "sdpa")

    def run(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        rows: list[list[torch.Tensor]] = [[] for _ in _ids(verifier)]
        taps = Taps(verifier.decoder, verifier.layers, _ids(verifier), lambda c, h: rows[c].append(h.clone()))
        try:
            state, start = None, 0
            for part in parts:
                _, state = verifier.forward_alone(part, state, start, with_logits, keep_state=len(parts) > 1)
                start += len(part)
        finally:
            taps.remove()
        return [torch.cat(r) for r in rows]

    whole = run([ids])
    differences = [difference(mine, theirs) for mine, theirs in zip(whole, plain, strict=True)]
    if not max(differences) <= _tolerance(verifier):
        # Some models report each layer's output where most report its input: entry k is then boundary k + 1.
        shifted = [difference(m, p) for m, p in zip(whole[1:-1], plain[:-2], strict=True)]
        if not max([*shifted, differences[-1]]) <= _tolerance(verifier):
            layer_id = _ids(verifier)[
                next(i for i, d in enumerate(differences) if not d <= _tolerance(verifier))
            ]
            raise UnsupportedModelError(
                f"{name} is refused: what it reports at boundary {layer_id} is not the input of that layer "
                f"(relative difference {max(differences):.1e})"
            )
    if not with_logits:
        return True
    try:
        stepwise = run([ids[:-2], ids[-2:-1], ids[-1:]])
    except Exception:  # noqa: BLE001 - any fault of a model nobody listed means: compute each sequence again
        return False
    return all(difference(s, w) <= _tolerance(verifier) for s, w in zip(stepwise, whole, strict=True))


def make_layout(slots: list[torch.Tensor], contexts: list[int], lengths: list[int]) -> BatchLayout:
    """A layout for a few sequences.

    Args:
        slots: for each sequence, [m] the slots of its tokens so far and in this step.
        contexts: tokens before this step.
        lengths: tokens in this step.
    """
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    totals = [c + n for c, n in zip(contexts, lengths, strict=True)]
    device = slots[0].device
    return BatchLayout(
        slot_mapping=torch.cat([s[c:] for s, c in zip(slots, contexts, strict=True)]),
        query_starts=starts,
        context_lens=contexts,
        slots=[s if c else None for s, c in zip(slots, contexts, strict=True)],
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor([0, *totals], device=device).cumsum(0).to(torch.int32),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(totals),
        all_slots=torch.cat(slots) if any(contexts) else None,
    )
