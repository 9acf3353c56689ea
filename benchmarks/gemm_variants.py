"""Which way of a decoder layer's products is fastest on this GPU, under the load of a long run.

    python benchmarks/gemm_variants.py [--hidden 4096 --intermediate 12288 --tokens 16384] --output FILE.json

A GPU that multiplies for seconds runs into its power limit and slows down, and what a kernel reads and
writes costs power too; so a few calls of each product say little. Here each variant runs for ``--seconds``,
the variants take turns for ``--rounds``, and the result is the median time of a call. Every variant's result
is compared with the first one's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from layertap.kernels.fused_product import gated_product, product_plus

Variant = Callable[[], torch.Tensor]


def norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def with_residual(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> dict[str, Variant]:
    """``norm(residual + x @ w.T)``, as it is between two parts of a layer."""
    add_and_norm = torch.compile(lambda a, b: (a + b, norm(a + b)), dynamic=True)
    only_norm = torch.compile(norm, dynamic=True)
    return {
        "product, then a kernel that adds and norms": lambda: add_and_norm(residual, F.linear(x, w))[1],
        "addmm, then the norm": lambda: only_norm(torch.addmm(residual, x, w.T)),
        "fused product, then the norm": lambda: only_norm(product_plus(x, w, residual)),
    }


def gated(x: torch.Tensor, w: torch.Tensor) -> dict[str, Variant]:
    """``silu(x @ gate.T) * (x @ up.T)``; ``w`` is both, one below the other."""
    half = w.shape[0] // 2
    gate, up = w[:half], w[half:]
    act = torch.compile(lambda g, u: F.silu(g) * u, dynamic=True)
    in_turns = torch.stack([gate, up], dim=1).flatten(0, 1)
    return {
        "two products, then a kernel": lambda: act(F.linear(x, gate), F.linear(x, up)),
        "one product, then a kernel": lambda: act(*F.linear(x, w).chunk(2, dim=-1)),
        "fused product": lambda: gated_product(x, in_turns),
    }


def attention_inputs(x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> dict[str, Variant]:
    """Queries, keys and values."""
    parts = w.split(sizes)

    def three() -> torch.Tensor:
        queries, *_ = [F.linear(x, part) for part in parts]
        return queries

    return {
        "three products": three,
        "one product": lambda: F.linear(x, w)[:, : sizes[0]],
    }


def compare(variants: dict[str, Variant], seconds: float, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    differences: dict[str, float] = {}
    first: torch.Tensor | None = None
    for name, run in variants.items():
        try:
            for _ in range(3):
                out = run()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the others are still worth measuring
            print(f"left out: {name} ({type(error).__name__}: {str(error)[:300]})")
            continue
        if first is None:
            first = out.float()
        differences[name] = float((out.float() - first).norm() / first.norm())
        times[name] = []
    for _ in range(rounds):
        for name in times:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            count, stop = 0, time.monotonic() + seconds
            begin.record()
            while time.monotonic() < stop:
                for _ in range(20):
                    variants[name]()
                count += 20
                torch.cuda.synchronize()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / count)
    return {
        name: {"ms": statistics.median(found), "all_ms": found, "difference": differences[name]}
        for name, found in times.items()
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=12288)
    parser.add_argument("--queries", type=int, default=4096, help="columns of the query projection")
    parser.add_argument("--keys", type=int, default=1024, help="columns of the key projection")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    x = random(args.tokens, args.hidden)
    wide = random(args.tokens, args.intermediate)
    queries = random(args.tokens, args.queries)
    groups = {
        "gate and up": gated(x, random(2 * args.intermediate, args.hidden, scale=0.02)),
        "down": with_residual(wide, random(args.hidden, args.intermediate, scale=0.02), x),
        "attention output": with_residual(queries, random(args.hidden, args.queries, scale=0.02), x),
        "attention input": attention_inputs(
            x, random(args.queries + 2 * args.keys, args.hidden, scale=0.02), [args.queries, *[args.keys] * 2]
        ),
    }
    results = {}
    for group, variants in groups.items():
        results[group] = compare(variants, args.seconds, args.rounds)
        for name, found in results[group].items():
            print(f"{group}: {name}: {found['ms']:.3f} ms, difference {found['difference']:.1e}", flush=True)
    if args.output is not None:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
