"""The CPU kernel against PyTorch's attention: every rule a model may have, any layout of a step."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.engine import cpu_attention
from layertap.engine.attention import AttentionLayer, BatchLayout, StepState

needs_kernel = pytest.mark.skipif(
    cpu_attention.library() is None, reason="no C++ compiler, or not an x86-64 CPU"
)


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = tuple("-O1" if flag == "-O3" else flag for flag in cpu_attention._FLAGS)
    monkeypatch.setattr(cpu_attention, "_FLAGS", flags)


def step(
    lens: list[int],
    contexts: list[int],
    layer: AttentionLayer,
    heads: int,
    dtype: torch.dtype,
    block: int = 4,
) -> tuple[BatchLayout, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step over shuffled cache slots whose contexts are filled, and its queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lens) + sum(contexts)
    slots = torch.randperm(total + 7, generator=generator)[:total]
    layer.allocate(total + 7, dtype, torch.device("cpu"))
    assert layer.key_cache is not None
    assert layer.value_cache is not None
    layer.key_cache.copy_(torch.randn(layer.key_cache.shape, generator=generator))
    layer.value_cache.copy_(torch.randn(layer.value_cache.shape, generator=generator))
    starts, mapping, each, used = [0], [], [], 0
    for n, context in zip(lens, contexts, strict=True):
        own = slots[used : used + n + context]
        used += n + context
        starts.append(starts[-1] + n)
        mapping.append(own[context:])
        each.append(own if context else None)
    layout = BatchLayout(torch.cat(mapping), starts, contexts, each)
    k = layer.num_kv_heads

    def draw(count: int, dim: int) -> torch.Tensor:
        return torch.randn(1, sum(lens), count, dim, generator=generator).to(dtype).transpose(1, 2)

    return layout, draw(heads, layer.key_dim), draw(k, layer.key_dim), draw(k, layer.value_dim)


def both(layer: AttentionLayer, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result, and PyTorch's in float32."""
    layout, q, k, v = inputs
    layer.step.layout = layout
    ours = layer(q, k, v)
    plain = dataclasses.replace(layer, native=False)
    assert plain.key_cache is not None
    assert plain.value_cache is not None
    plain.key_cache, plain.value_cache = plain.key_cache.float(), plain.value_cache.float()
    return ours, plain(q.float(), k.float(), v.float())


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype in (torch.float32, torch.bfloat16)
    assert torch.isfinite(ours).all()
    tolerance = 2e-6 if ours.dtype is torch.float32 else 8e-3
    assert (ours.float() - theirs).norm() <= tolerance * theirs.norm()
    assert (ours.float() - theirs).abs().max() <= tolerance * 8 * theirs.abs().max()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [
        (9, 3, 64, 64),
        (4, 4, 16, 16),
        (8, 1, 128, 128),
        (2, 2, 24, 10),
        (3, 1, 7, 5),
        (6, 2, 192, 128),
        (1, 1, 1, 1),
    ],
)
def test_equals_pytorch_for_any_head_shape(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    layer = AttentionLayer(StepState(), kv_heads, key_dim, value_dim, key_dim**-0.5)
    close(*both(layer, *step([1, 200, 5, 48, 49, 96], [0] * 6, layer, heads, dtype)))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"window": 1},
        {"window": 7},
        {"window": 64},
        {"softcap": 5.0},
        {"sinks": True},
        {"window": 9, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
def test_equals_pytorch_with_windows_soft_caps_and_sinks(rules: dict[str, Any], dtype: torch.dtype) -> None:
    if rules.get("sinks"):
        rules = {**rules, "sinks": torch.linspace(-2, 3, 8)}
    layer = AttentionLayer(StepState(), 2, 32, 32, 0.3, **rules)
    close(*both(layer, *step([130, 3, 1, 70], [0, 55, 200, 1], layer, 8, dtype)))


@needs_kernel
def test_reads_the_cache_where_a_sequence_has_a_context() -> None:
    layer = AttentionLayer(StepState(), 3, 64, 64, 0.125)
    layout, q, k, v = step([10, 1], [90, 300], layer, 9, torch.float32)
    whole, _ = both(layer, layout, q, k, v)
    assert layer.key_cache is not None
    layer.key_cache[layout.slots[0][:90]] = 0  # type: ignore[index]
    changed, _ = both(layer, layout, q, k, v)
    assert not torch.equal(whole[:, :10], changed[:, :10])
    assert torch.equal(whole[:, 10:], changed[:, 10:])


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("dim", "heads"), [(16, 2), (64, 6)], ids=["small", "tiles"])
def test_what_is_not_finite_stays_so_and_reaches_no_other_sequence(
    dim: int, heads: int, dtype: torch.dtype
) -> None:
    layer = AttentionLayer(StepState(), 1, dim, dim, 0.25)
    layout, q, k, v = step([5, 5, 5], [0, 0, 0], layer, heads, dtype)
    v[:, :, 7] = float("nan")
    k[:, :, 12] = float("nan")
    layer.step.layout = layout
    out = layer(q, k, v)
    assert torch.isfinite(out[:, :5]).all()
    assert torch.isnan(out[:, 7:10]).all()
    assert torch.isnan(out[:, 12:]).all()


@needs_kernel
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00001, 0x7F800001], ids=hex)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_nan_stays_one_whatever_its_bits(bits: int, softcap: float | None) -> None:
    layer = AttentionLayer(StepState(), 1, 16, 16, 0.25, softcap=softcap)
    layout, q, k, v = step([5], [0], layer, 2, torch.float32)
    k[:, :, 2] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    layer.step.layout = layout
    assert torch.isnan(layer(q, k, v)).flatten(2).all(2).tolist() == [[False, False, True, True, True]]


@needs_kernel
@pytest.mark.parametrize("wrong", ["key", "value"])
@pytest.mark.parametrize("change", ["dtype", "dim", "heads", "tokens"])
def test_keys_and_values_that_do_not_fit_the_cache_are_refused(wrong: str, change: str) -> None:
    layer = AttentionLayer(StepState(), 2, 16, 16, 0.25)
    layout, q, k, v = step([5], [3], layer, 4, torch.bfloat16)
    layer.step.layout = layout
    x = k if wrong == "key" else v
    x = {"dtype": x.float(), "dim": x[..., :8], "heads": x[:, :1], "tokens": x[:, :, :4]}[change]
    with pytest.raises(ValueError, match=f"{wrong}s .* the cache takes"):
        layer(q, *((x, v) if wrong == "key" else (k, x)))


@needs_kernel
@pytest.mark.parametrize("wrong", ["dtype", "key dim", "heads"])
def test_inputs_that_do_not_belong_together_are_refused(wrong: str) -> None:
    layer = AttentionLayer(StepState(), 2, 16, 16, 0.25)
    layout, q, k, v = step([5], [3], layer, 4, torch.bfloat16)
    layer.step.layout = layout
    wrongs = {"dtype": q.float(), "key dim": torch.cat([q, q], dim=3), "heads": q[:, :3]}
    with pytest.raises((RuntimeError, ValueError)):
        layer(wrongs[wrong], k, v)


@needs_kernel
def test_large_scores_do_not_overflow() -> None:
    layer = AttentionLayer(StepState(), 1, 16, 16, 100.0)
    close(*both(layer, *step([80], [0], layer, 1, torch.float32)))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("growth", [0.01, 0.2, -0.2], ids=["slow", "fast", "falling"])
def test_maxima_that_move_from_block_to_block(growth: float, dtype: torch.dtype) -> None:
    layer = AttentionLayer(StepState(), 1, 64, 64, 1.0)
    layout, q, k, v = step([500, 150], [0, 300], layer, 3, dtype)
    q[..., 0], q[..., 1:] = 1.0, 0.0
    k[..., 0] += growth * torch.arange(650)  # every query's scores rise, or fall, along the sequence
    close(*both(layer, layout, q, k, v))


@needs_kernel
def test_takes_queries_in_any_memory_order() -> None:
    layer = AttentionLayer(StepState(), 3, 64, 64, 0.125)
    layout, q, k, v = step([33, 20], [0, 0], layer, 9, torch.float32)
    layer.step.layout = layout
    strided = layer(q, k, v)
    assert torch.equal(strided, layer(q.contiguous(), k.contiguous(), v.contiguous()))
    spread = torch.empty(*q.shape[:3], 128)[..., ::2].copy_(q)
    assert spread.stride(-1) == 2
    assert torch.equal(strided, layer(spread, k, v))


def test_without_a_compiler_pytorch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with caplog.at_level(logging.INFO, "layertap"):
        assert cpu_attention.library.__wrapped__() is None
    assert "/no/such/compiler" in caplog.text
    layer = AttentionLayer(StepState(), 1, 16, 16, 0.25)
    monkeypatch.setattr(cpu_attention, "library", lambda: None)
    layout, q, k, v = step([5], [0], layer, 2, torch.float32)
    assert not cpu_attention.supports(layer, q)
    layer.step.layout = layout
    assert layer(q, k, v).shape == (1, 5, 2, 16)


@needs_kernel
def test_the_compiler_may_be_several_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_build: None
) -> None:
    monkeypatch.setenv("CXX", " env g++ -fno-plt")
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path))
    assert cpu_attention.library.__wrapped__() is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@needs_kernel
def test_a_compiler_that_fails_is_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no space left" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "layertap"):
        assert cpu_attention.library.__wrapped__() is None
    assert "no space left" in caplog.text
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@needs_kernel
def test_the_kernel_is_built_once_for_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path))
    assert cpu_attention.library.__wrapped__() is not None
    (built,) = (tmp_path / "kernels").iterdir()
    before = built.stat().st_mtime_ns
    assert cpu_attention.library.__wrapped__() is not None
    assert built.stat().st_mtime_ns == before


@needs_kernel
@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_a_torn_library_is_built_again(
    left: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    quick_build: None,
) -> None:
    """As a crash or a full disk may leave it; loading it would end the process."""
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path))
    assert cpu_attention.library.__wrapped__() is not None
    (built,) = (tmp_path / "kernels").iterdir()
    whole = built.read_bytes()
    built.unlink()  # it is in use
    built.write_bytes(whole[: int(left * len(whole))])
    with caplog.at_level(logging.WARNING, "layertap"):
        assert cpu_attention.library.__wrapped__() is not None
    assert not caplog.records
    assert built.stat().st_size == len(whole)


@needs_kernel
@pytest.mark.parametrize("trouble", ["no home", "a file", "cannot be written"])
def test_without_a_folder_to_keep_it_in_the_kernel_is_built_for_the_process(
    trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_build: None
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path / "cache"))
    if trouble == "no home":

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("LAYERTAP_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    elif trouble == "a file":
        (tmp_path / "cache").write_text("")
    else:
        make = tempfile.mkdtemp

        def refuse(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:
            if dir is not None and str(dir).startswith(str(tmp_path / "cache")):
                raise PermissionError(errno.EACCES, "Permission denied", str(dir))
            return make(suffix, prefix, dir)

        monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert cpu_attention.library.__wrapped__() is not None
    assert list(temporary.iterdir()) == [], "nothing stays behind"


@needs_kernel
def test_a_kernel_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in cpu_attention._SOURCES:
        shutil.copy(path, tmp_path)
    wrong = tmp_path / cpu_attention._SOURCE.name
    source = wrong.read_text()
    assert "position[n] >= at" in source
    wrong.write_text(source.replace("position[n] >= at", "position[n] > at"))
    monkeypatch.setattr(cpu_attention, "_SOURCE", wrong)
    monkeypatch.setenv("LAYERTAP_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "layertap"):
        assert cpu_attention.library.__wrapped__() is None
    assert "wrong in torch.float32" in caplog.text
