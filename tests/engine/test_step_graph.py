"""Steps that are filled up and replayed give the right states and tokens.

CUDA graphs need a GPU (see test_step_graph_gpu.py). Here a stand-in computes what they would: the whole step
with its padding, all padded attention rows NaN, everything else of the engine as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import reference
from layertap import LLM, SamplingParams
from layertap.engine.attention import AttentionLayer, BatchLayout
from layertap.engine.plan import position_arguments
from layertap.engine.step_graph import StepGraph
from tiny_models import random_prompts


class Computed(StepGraph):
    """Computes instead of replaying."""

    spoil = False

    def record(self, memory: Any) -> None:
        pass

    def fill(self, ids: Any, positions: Any, slots: Any) -> None:
        for target, values, padding in (
            (self.ids_T, ids, 0),
            (self.positions_T, positions, 0),
            (self.slots_T, slots, self._padding_slot),
        ):
            target.fill_(padding)
            target[: len(values)] = torch.from_numpy(values)

    @contextlib.contextmanager
    def replaying(self, layout: BatchLayout) -> Iterator[None]:
        decoder = self._verifier.decoder
        count = layout.query_starts[-1]
        original, call = decoder.forward, AttentionLayer.__call__
        self.num_replays += 1

        def attend(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_full((1, q.shape[2], q.shape[1], v.shape[3]), float("nan"))
            call(layer, q[:, :, :count], k[:, :, :count], v[:, :, :count], out[:, :count])
            return out

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = {"input_ids": self.ids_T[None], "use_cache": False}
            arguments.update(position_arguments(decoder, self.positions_T[None]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AttentionLayer, "__call__", attend)
                output = original(**arguments)
            if self.spoil:
                output[0].mul_(1.1)
            return output

        decoder.forward = forward
        try:
            yield
        finally:
            del decoder.forward


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gpt_oss"])
def test_filled_up_steps(
    name: str, caching: bool, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    path = tiny(name)
    options = {"layers": ["all", "norm"], "block_size": 4, "max_num_seqs": 6}
    llm = make_llm(path, max_num_batched_tokens=32, enable_prefix_caching=caching, **options)
    runner = llm._core.runner
    graphs = [Computed(runner.verifier, size, runner._padding_slot) for size in (32, 20)]
    for graph in graphs:
        runner.recorded.add(graph)
    runner.recorded.launch_seconds = 25.0
    runner.recorded.token_seconds = 1.0  # so that few tokens are launched, or take the smaller one
    prompts = random_prompts(1, [40, 3, 17, 1, 90, 25, 30, 16, 16, 7]) + random_prompts(1, [40, 3, 17, 1])
    for prompt, got in zip(prompts, llm.extract(prompts), strict=True):
        reference.assert_states(got.hidden_states, reference.states(path, prompt), 2e-5)
    assert graphs[0].num_replays > 3
    plain = make_llm(path, enable_prefix_caching=False, **options)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=2, ignore_eos=True, prompt_logprobs=1)
    for ours, theirs in zip(
        llm.generate(prompts[:6], params), plain.generate(prompts[:6], params), strict=True
    ):
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs]
        assert ours.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        for a, b in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert a is not None
            assert b is not None
            assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for token in b)
    assert all(graph.num_replays > 3 for graph in graphs)
    assert "forward" not in vars(runner.verifier.decoder)


@pytest.mark.parametrize("spoil", [False, True])
def test_a_replay_that_gives_something_else_is_not_used(
    spoil: bool, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_llm("llama", layers=["norm"], max_num_batched_tokens=32)._core.runner
    hooks = len(runner.verifier.decoder._forward_hooks)
    monkeypatch.setattr("layertap.engine.runner.StepGraph", Computed)
    monkeypatch.setattr(Computed, "spoil", spoil)
    if spoil:
        with pytest.raises(RuntimeError, match="another result"):
            runner.record(32)
        assert runner.recorded.graphs == []
    else:
        runner.record(32)
        assert [type(graph) for graph in runner.recorded.graphs] == [Computed]
    assert len(runner.verifier.decoder._forward_hooks) == hooks
