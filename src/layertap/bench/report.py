"""Benchmark results as tables for people: on the terminal, and in Markdown for the README."""

from __future__ import annotations

from typing import Any

from layertap.engine.memory import format_bytes

_TITLES = {
    "torch": "layertap",
    "torch-no-extraction": "layertap, no extraction",
    "transformers": "transformers, one by one",
    "transformers-batched": "transformers, padded batches of 8",
    "vllm-no-extraction": "vLLM, no extraction",
    "vllm": "vLLM with extraction",
}
COLUMNS = ("way", "tokens/s", "min to max", "layertap is", "first file", "peak memory", "start")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each peer of the ``cpu`` suite."""
    peers = result["peers"]
    ours = peers.get("torch", {}).get("tokens_per_second", {}).get("median")
    table: list[tuple[str, ...]] = []
    for name, peer in peers.items():
        rate = peer["tokens_per_second"]
        ratio = f"{ours / rate['median']:.2f} x" if ours and name != "torch" else ""
        first = peer["first_file_seconds"]
        table.append(
            (
                _TITLES.get(name, name),
                f"{rate['median']:,.0f}",
                f"{rate['min']:,.0f} to {rate['max']:,.0f}",
                ratio,
                f"{first:.2f} s" if first else "",
                format_bytes(peer["peak_rss_bytes"]),
                f"{peer['start_seconds']:.1f} s" if peer["start_seconds"] is not None else "",
            )
        )
    return table


def summary(result: dict[str, Any]) -> str:
    """One line for the suites that have no table."""
    if result["suite"] == "prefix":
        on, off = (result[k]["tokens_per_second"]["median"] for k in ("prefix_caching", "no_prefix_caching"))
        return f"prefix caching: {on:,.0f} tokens/s against {off:,.0f} without, {result['speedup']:.1f} x"
    few, many = (format_bytes(result[f"prompts_{n}"]["peak_rss_bytes"]) for n in (64, 2000))
    return f"peak memory: {few} for 64 prompts, {many} for 2,000 ({result['growth']:+.1%})"


def markdown(result: dict[str, Any]) -> str:
    """The ``cpu`` suite's table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(result)]
    return "\n".join(lines)
