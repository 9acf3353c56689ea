"""Recorded steps of a few sizes, and which of them a step is filled up to.

Launching a step takes the host about a millisecond a layer, whatever its size: with a small model as long as
the GPU computes a full one. A replay takes it a fraction of that, but computes the padding, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from layertap.engine.step_graph import StepGraph

_SHARES = (0.75, 0.5, 0.25, 0.0625)
_MULTIPLE = 64  # of tokens: kernels are compiled once more for numbers that are not even
_LITTLE = 64  # one token in so many may always be padding


class RecordedSteps:
    """Steps that can be replayed, by size."""

    def __init__(self) -> None:
        self.graphs: list[StepGraph] = []
        """The smallest first."""
        self.launch_seconds = 0.0
        """What launching a step takes the host, beside what a replay does."""
        self.token_seconds = 0.0
        """What the GPU computes for a token of a full step."""

    def add(self, graph: StepGraph) -> None:
        self.graphs.append(graph)
        self.graphs.sort(key=lambda g: g.num_tokens)

    def smaller_sizes(self, num_tokens: int) -> Iterator[int]:
        """Sizes below that of a full step that some step would be filled up to."""
        sizes = [int(num_tokens * share) // _MULTIPLE * _MULTIPLE for share in _SHARES]
        for size in dict.fromkeys(sizes):
            if size > 0 and size * self.token_seconds < self.launch_seconds:
                yield size

    def pick(self, num_tokens: int) -> StepGraph | None:
        """The recorded step to fill up for so many tokens; None where launching one costs less."""
        graph = next((g for g in self.graphs if g.num_tokens >= num_tokens), None)
        if graph is None:
            return None
        size = graph.num_tokens
        if size - num_tokens <= size // _LITTLE:
            return graph
        launched = max(self.launch_seconds, num_tokens * self.token_seconds)
        return graph if size * self.token_seconds < launched else None

    def clear(self) -> None:
        self.graphs.clear()
