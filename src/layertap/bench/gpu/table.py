"""The table of the ``gpu`` suite: a line for each ratio, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layertap.bench.gpu.rows import WAYS

COLUMNS = (
    "row", "workload", "way", "tokens/s", "min to max", "MFU", "GB/s",
    "against", "its tokens/s", "ratio", "required", "reached",
)  # fmt: skip


def lines(document: Mapping[str, Any], letters: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """The lines of the table.

    Args:
        document: of a result file.
        letters: the rows; None takes all that the file holds.
    """
    table: list[tuple[str, ...]] = []
    for part in ("rows", "partial"):
        for letter, entry in document[part].items():
            if letters is not None and letter not in letters:
                continue
            shown = letter if part == "rows" else f"{letter} (unfinished)"
            for i, pair in enumerate(entry["ratios"]):
                first = (shown, entry["workload"]["describe"]) if i == 0 else ("", "")
                table.append((*first, *_line(entry, pair)))
    return table


def _line(entry: Mapping[str, Any], pair: Mapping[str, Any]) -> tuple[str, ...]:
    mine, other = (entry["ways"].get(pair[name], {}) for name in ("way", "against"))
    start = entry["workload"]["measure"] == "start"
    required = pair["required"]
    sign = "at most" if start else "at least"
    return (
        WAYS[pair["way"]],
        _figure(mine),
        _spread(mine),
        f"{mine['mfu']:.2f}" if "mfu" in mine else "",
        f"{mine['states_bytes_per_second'] / 1e9:.1f}" if mine.get("states_bytes_per_second") else "",
        WAYS[pair["against"]],
        _figure(other),
        f"{pair['ratio']:.2f} x" if pair["ratio"] is not None else f"missing: {pair['why']}",
        f"{sign} {required:.2f} x" if required is not None else "",
        {True: "yes", False: "no", None: ""}[pair["reached"]],
    )


def _figure(outcome: Mapping[str, Any]) -> str:
    if "tokens_per_second" in outcome:
        return f"{outcome['tokens_per_second']['median']:,.0f}"
    return ", ".join(f"{start['seconds']:.1f} s" for start in outcome.get("starts", []))


def _spread(outcome: Mapping[str, Any]) -> str:
    if "tokens_per_second" in outcome:
        rate = outcome["tokens_per_second"]
        return f"{rate['min']:,.0f} to {rate['max']:,.0f}"
    return "caches empty, filled" if outcome.get("starts") else ""


def notes(document: Mapping[str, Any], letters: Sequence[str]) -> list[str]:
    """What belongs under the table: on what it was measured and how, and what to know of a row."""
    entries = [(letter, document["rows"][letter]) for letter in letters if letter in document["rows"]]
    found = dict.fromkeys(_machine(entry) for _, entry in entries)
    if entries:
        found[document["order"]] = None
    return [
        *found,
        *(f"{letter}: {note}" for letter, entry in entries if (note := entry["workload"]["note"])),
    ]


def _machine(entry: Mapping[str, Any]) -> str:
    machine, peak = entry["machine"], entry["peak"]
    size = peak["matmul_size"]
    text = f"{machine.get('gpu') or machine['cpu']}: {peak['matmul_flops_per_second'] / 1e12:,.1f} TFLOP/s "
    text += f"in a {size} x {size} x {size} matrix product"
    if peak["copy_bytes_per_second"]:
        text += f", {peak['copy_bytes_per_second'] / 1e9:.1f} GB/s from the GPU to page-locked memory"
    return text


def markdown(document: Mapping[str, Any]) -> str:
    """The table of everything in a result file, in Markdown."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines(document)])
