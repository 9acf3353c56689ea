"""Matrix products whose ends are hidden, by warps that do different work (warp specialization), for Hopper.

What follows a product takes a persistent kernel's time twice: while it waits for what it reads, and while
the tensor cores wait for it. Here one warp brings the tiles of both operands, and beside them, tiles ahead,
what is added to the result, or the angles by which heads are rotated. Two groups of four warps multiply,
each half of a tile, and need not be in step: while one finishes its half the other has the tensor cores.

An H200's power limit holds its clock at 1.45 of 1.98 GHz in a long run. A layer of Qwen3-8B there, 16,384
tokens, without attention: 9.72 ms with the products of ``fused_product`` and a kernel for norm and rotary
embedding, 9.60 with these two in their place; Qwen3-0.6B 0.942 and 0.892. Gated products and those that are
only scaled gain nothing from it (4.97 ms instead of 4.94): they stay there.

Written in Gluon, Triton's language for layouts and barriers.

Shapes: T tokens, H hidden size, N columns of the result, P tiles of columns, D size of a head.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from layertap.kernels.fused_product import num_squares
from layertap.kernels.triton_support import multiprocessors, on_device_of

HEAD_SIZES = (64, 128)
"""D that heads may have: two or more of them in a tile, and angles that fit where the result will lie."""
_ROWS, _COLUMNS, _DEPTH = 128, 256, 64
_GROUP = 8  # tiles of rows that share a tile of columns while it is in the cache
_STAGES = 3  # tiles of operands that are there or on their way
_REGISTERS, _FEW_REGISTERS = 232, 24  # of a thread that multiplies, of one that brings


@gluon.jit
def _place(tile, row_tiles, column_tiles, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    per_group = GROUP * column_tiles
    first = tile // per_group * GROUP
    height = min(row_tiles - first, GROUP)
    row = (first + tile % per_group % height) * ROWS
    return row, tile % per_group // height * COLUMNS


@gluon.jit
def _bring(
    x, weight, residual, cos, sin, a, b, ends, full, empty, ends_full, ends_empty, rows, columns, depth,
    ROPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, HEAD: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = ROWS // 2
    HEADS: gl.constexpr = COLUMNS // HEAD
    SIZE: gl.constexpr = x.dtype.primitive_bitwidth // 8
    row_tiles = gl.cdiv(rows, ROWS)
    column_tiles = gl.cdiv(columns, COLUMNS)
    steps = gl.cdiv(depth, DEPTH)
    at = 0
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _place(tile, row_tiles, column_tiles, ROWS, COLUMNS, GROUP)
        for k in range(steps):
            stage = at % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready, (ROWS + COLUMNS) * DEPTH * SIZE)
            tma.async_copy_global_to_shared(x, [row, k * DEPTH], ready, a.index(2 * stage))
            tma.async_copy_global_to_shared(x, [row + HALF, k * DEPTH], ready, a.index(2 * stage + 1))
            tma.async_copy_global_to_shared(weight, [column, k * DEPTH], ready, b.index(stage))
            at += 1
            # Later than those who multiply give the place back, in a step that needs no more operands for it.
            if k == min(4, steps - 1):
                for half in gl.static_range(2):
                    there = ends_full.index(half)
                    mbarrier.wait(ends_empty.index(half), (turn & 1) ^ 1)
                    if ROPE:
                        mbarrier.expect(there, 2 * HALF * HEAD * SIZE)
                        first = half * HEADS
                        tma.async_copy_global_to_shared(cos, [row + half * HALF, 0], there, ends.index(first))
                        tma.async_copy_global_to_shared(
                            sin, [row + half * HALF, 0], there, ends.index(first + 1)
                        )
                    else:
                        mbarrier.expect(there, HALF * COLUMNS * SIZE)
                        tma.async_copy_global_to_shared(
                            residual, [row + half * HALF, column], there, ends.index(half)
                        )
        turn += 1  # noqa: SIM113 - of a kernel


@gluon.jit
def _halves(x, HEADS: gl.constexpr, HEAD: gl.constexpr):
    """[R, HEADS * HEAD] -> the two halves of heads, [R, HEADS, HEAD / 2] each."""
    parts = gl.reshape(x, (x.shape[0], HEADS, 2, HEAD // 2))
    return gl.split(gl.permute(parts, (0, 1, 3, 2)))


@gluon.jit
def _rotated(
    total, factor, norm, eps, cos, sin, ready, phase,
    COLUMNS: gl.constexpr, HEAD: gl.constexpr, NORMED: gl.constexpr,
):  # fmt: skip
    """Heads scaled, normalised and rotated, as they lie in a tile."""
    HEADS: gl.constexpr = COLUMNS // HEAD
    ANGLES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD, 16]
    )
    first, second = _halves(total, HEADS, HEAD)
    LAYOUT: gl.constexpr = first.type.layout
    rows = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    scale = gl.convert_layout(rows, gl.SliceLayout(2, LAYOUT))
    if NORMED:
        weight = gl.load(norm + gl.arange(0, HEAD, layout=gl.SliceLayout(0, ANGLES))).to(gl.float32)
        one, two = gl.split(gl.permute(gl.reshape(weight, (2, HEAD // 2)), (1, 0)))
        IN_HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
        mean = (gl.sum(first * first, 2) + gl.sum(second * second, 2)) / HEAD
        scale = gl.expand_dims(scale * gl.rsqrt(mean * scale * scale + eps), 2)
        first = first * scale * gl.expand_dims(gl.expand_dims(gl.convert_layout(one, IN_HEAD), 0), 0)
        second = second * scale * gl.expand_dims(gl.expand_dims(gl.convert_layout(two, IN_HEAD), 0), 0)
    else:
        first = first * gl.expand_dims(scale, 2)
        second = second * gl.expand_dims(scale, 2)
    mbarrier.wait(ready, phase)
    cos_1, cos_2 = _halves(cos.load(ANGLES), 1, HEAD)
    sin_1, sin_2 = _halves(sin.load(ANGLES), 1, HEAD)
    dtype: gl.constexpr = cos.dtype
    turned_1 = (
        first * gl.convert_layout(cos_1, LAYOUT).to(gl.float32)
        - second * gl.convert_layout(sin_1, LAYOUT).to(gl.float32)
    ).to(dtype)
    turned_2 = (
        second * gl.convert_layout(cos_2, LAYOUT).to(gl.float32)
        + first * gl.convert_layout(sin_2, LAYOUT).to(gl.float32)
    ).to(dtype)
    whole = gl.permute(gl.join(turned_1, turned_2), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(whole, (total.shape[0], COLUMNS)), total.type.layout)


@gluon.jit
def _multiply(
    half: gl.constexpr, out, a, b, ends, angles, full, empty, ends_full, ends_empty,
    scale, squares, norm, eps, rows, columns, depth,
    ROPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, HEAD: gl.constexpr,
    NORMED: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = ROWS // 2
    HEADS: gl.constexpr = COLUMNS // HEAD
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    row_tiles = gl.cdiv(rows, ROWS)
    column_tiles = gl.cdiv(columns, COLUMNS)
    steps = gl.cdiv(depth, DEPTH)
    at = 0
    turn = 0
    mine = ends.index(half)
    ready = ends_full.index(half)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _place(tile, row_tiles, column_tiles, ROWS, COLUMNS, GROUP)
        row += half * HALF
        these = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        if ROPE:
            factor = gl.load(scale + these, mask=these < rows, other=0.0)
        total = gl.zeros((HALF, COLUMNS), gl.float32, layout=LAYOUT)
        for k in range(steps):
            stage = at % STAGES
            mbarrier.wait(full.index(stage), at // STAGES & 1)
            left, right = a.index(2 * stage + half), b.index(stage).permute((1, 0))
            total = warpgroup_mma(left, right, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=k > 0)  # the step before has ended
            at += 1
            if (k == min(2, steps - 1)) & (turn > 0):  # by now the last tile's result has left
                tma.store_wait(0)
                mbarrier.arrive(ends_empty.index(half))
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
        if ROPE:
            cos, sin = angles.index(half * HEADS), angles.index(half * HEADS + 1)
            value = _rotated(total, factor, norm, eps, cos, sin, ready, turn & 1, COLUMNS, HEAD, NORMED)
        else:
            mbarrier.wait(ready, turn & 1)
            value = (total + mine.load(LAYOUT).to(gl.float32)).to(out.dtype)
        mine.store(value)  # where the residual was, or the angles
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row, column], mine)
        if not ROPE:
            wide = value.to(gl.float32)  # of what is stored; beyond the last column that is zero
            place = these * column_tiles + column // COLUMNS
            gl.store(squares + place, gl.sum(wide * wide, 1), mask=these < rows)
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "eps"])
def _specialized_product(
    x, weight, out, residual, cos, sin, scale, squares, norm, eps, rows, columns, depth,
    ROPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, HEAD: gl.constexpr,
    NORMED: gl.constexpr, REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = ROWS // 2
    a = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, DEPTH], x.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, DEPTH], weight.layout)
    ends = gl.allocate_shared_memory(x.dtype, [2, HALF, COLUMNS], out.layout)
    if ROPE:  # noqa: SIM108 - Triton takes constants apart only here
        angles = ends._reinterpret(x.dtype, [2 * (COLUMNS // HEAD), HALF, HEAD], cos.layout)
    else:
        angles = ends
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ends_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ends_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ends_full.index(i), count=1)
        mbarrier.init(ends_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    gl.constexpr(0), out, a, b, ends, angles, full, empty, ends_full, ends_empty,
                    scale, squares, norm, eps, rows, columns, depth,
                    ROPE, ROWS, COLUMNS, DEPTH, GROUP, PROGRAMS, STAGES, HEAD, NORMED,
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(1), out, a, b, ends, angles, full, empty, ends_full, ends_empty,
                    scale, squares, norm, eps, rows, columns, depth,
                    ROPE, ROWS, COLUMNS, DEPTH, GROUP, PROGRAMS, STAGES, HEAD, NORMED,
                ),
            ),
            (
                _bring,
                (
                    x, weight, residual, cos, sin, a, b, angles, full, empty, ends_full, ends_empty,
                    rows, columns, depth,
                    ROPE, ROWS, COLUMNS, DEPTH, GROUP, PROGRAMS, STAGES, HEAD,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip


def rows_of_three_turns(device: torch.device) -> int:
    """Tokens for which some programs have a third tile, if there are two tiles of columns: what goes wrong
    from one tile to the next has then been seen."""
    return _ROWS * multiprocessors(device) + 8


def product_plus(
    x_TH: torch.Tensor, weight_NH: torch.Tensor, residual_TN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x @ weight.T``, rounded once, and the squares of its rows.

    Args:
        x_TH: [T, H] bfloat16 or float16 on a GPU, contiguous.
        weight_NH: [N, H], alike. H and N are multiples of 8.
        residual_TN: [T, N], alike.

    Returns:
        [T, N], and [T, P] float32, whose sums over P are the sums of the squares of a row.
    """
    assert residual_TN.shape == (x_TH.shape[0], weight_NH.shape[0])
    out = torch.empty_like(residual_TN)
    squares = out.new_empty(out.shape[0], num_squares(out.shape[1]), dtype=torch.float32)
    added = _tiles(residual_TN, _COLUMNS)
    _launch(x_TH, weight_NH, out, added, added, added, squares, squares, None, 0.0, _COLUMNS // 2, rope=False)
    return out, squares


def rotated_product(
    x_TH: torch.Tensor,
    weight_NH: torch.Tensor,
    scale_T: torch.Tensor | None,
    norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Heads ``r * cos + rotate_half(r) * sin``, where ``r`` is ``p = s * (x @ weight.T)``, or
    ``rms_norm(p) * norm``; rounded once.

    Args:
        x_TH: [T, H] bfloat16 or float16 on a GPU, contiguous.
        weight_NH: [N, H], alike. H is a multiple of 8, N of D.
        scale_T: [T] float32; None: ones.
        norm_D: [D], D one of ``HEAD_SIZES``.
        cos_TD: [T, D], of x's dtype, contiguous; ``sin_TD`` alike.

    Returns:
        [T, N]
    """
    rows, size = cos_TD.shape
    assert size in HEAD_SIZES
    assert weight_NH.shape[0] % size == 0
    assert sin_TD.shape == cos_TD.shape == (x_TH.shape[0], size)
    assert cos_TD.dtype == sin_TD.dtype == x_TH.dtype
    assert norm_D is None or norm_D.shape == (size,)
    out = x_TH.new_empty(rows, weight_NH.shape[0])
    if scale_T is None:
        scale_T = x_TH.new_ones(rows, dtype=torch.float32)
    cos, sin = _tiles(cos_TD, size), _tiles(sin_TD, size)
    _launch(x_TH, weight_NH, out, cos, cos, sin, scale_T, scale_T, norm_D, eps, size, rope=True)
    return out


def _tiles(matrix: torch.Tensor, columns: int, rows: int = _ROWS // 2) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: TensorDescriptor,
    cos: TensorDescriptor,
    sin: TensorDescriptor,
    scale: torch.Tensor,
    squares: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    head: int,
    rope: bool,
) -> None:
    rows, depth = x.shape
    columns = weight.shape[0]
    assert x.dtype == weight.dtype == out.dtype
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape[1] == depth
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    assert scale.shape[0] == rows
    programs = multiprocessors(x.device)
    with on_device_of(x):
        _specialized_product[(programs,)](
            _tiles(x, _DEPTH),
            _tiles(weight, _DEPTH, _COLUMNS),
            _tiles(out, _COLUMNS),
            residual,
            cos,
            sin,
            scale,
            squares,
            scale if norm is None else norm,
            eps,
            rows,
            columns,
            depth,
            rope,
            _ROWS,
            _COLUMNS,
            _DEPTH,
            _GROUP,
            programs,
            _STAGES,
            head,
            norm is not None,
            _REGISTERS,
            _FEW_REGISTERS,
            num_warps=4,
        )
