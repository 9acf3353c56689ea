"""The connector inside vLLM's CPU build, over one tiny model: what vLLM's example connector gets wrong, and
what must stay right."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import reference
from layertap import LLM, ExtractionError, InvalidInputError, SamplingParams, reader
from layertap.outputs import RequestOutput
from layertap.vllm.plan import writes_slots_last
from tiny_models import VOCAB
from vllm_engine.support import free_blocks, leftovers, scheduler_of, settle, vllm_of, writer_of

pytestmark = pytest.mark.vllm
IDS = [5, 2, 0, 2]
GREEDY: dict[str, Any] = {"temperature": 0.0, "detokenize": False}


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def llm(start: Callable[..., LLM], folder: Path) -> LLM:
    extra = {
        "shared_storage_path": str(folder),
        "staging_chunk_bytes": 16 << 10,
        "staging_ring_bytes": 64 << 10,
    }
    return start(
        "llama",
        layers=IDS,
        kv_transfer_config={"kv_connector": "LayertapConnector", "kv_connector_extra_config": extra},
    )


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    return tiny("llama", head_dim=32)


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Iterator[None]:
    """After every test: all blocks free, no lock held, no request left."""
    before = free_blocks(llm)
    yield
    settle(llm)
    deadline = time.monotonic() + 10
    while len(writer_of(llm).publication) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert free_blocks(llm) == before
    assert len(writer_of(llm).publication) == 0
    assert writer_of(llm).producer.idle
    assert not scheduler_of(llm).connector._entries


def states_of(output: RequestOutput) -> Any:
    assert output.kv_transfer_params is not None
    return reader.open(output.kv_transfer_params["hidden_states_path"], timeout=0)


def test_vllms_own_writer_agrees_with_the_cache_that_was_registered(llm: LLM) -> None:
    from vllm.model_executor.models.extract_hidden_states import basic_cache

    cache = writer_of(llm).producer.cache
    assert cache.shape[2:] == (3, 64)
    assert cache.is_contiguous() is not writes_slots_last(basic_cache)


def test_columns_come_in_the_order_asked_with_repetitions(llm: LLM, path: str) -> None:
    prompts = [prompt(n, n) for n in (1, 31, 32, 33, 128, 129, 300)]
    together = list(llm.extract(prompts))
    for states, ids in zip(together, prompts, strict=True):
        assert states.token_ids.tolist() == ids
        assert states.layer_ids == tuple(IDS)
        reference.assert_states(states.hidden_states, reference.states(path, ids)[:, IDS])
    alone = [next(llm.extract([ids])) for ids in prompts]
    for a, b in zip(together, alone, strict=True):
        reference.assert_states(a.hidden_states, b.hidden_states, 1e-6)


def test_chunked_prefill_and_prefix_hits_together_give_every_row(llm: LLM, path: str) -> None:
    llm.reset_prefix_cache()
    long = prompt(400, 1)
    cold = llm.generate([long], SamplingParams(max_tokens=1, **GREEDY))[0]
    warm = llm.generate([long], SamplingParams(max_tokens=1, **GREEDY))[0]
    other = long[:250] + prompt(60, 2)
    tail = llm.generate([other], SamplingParams(max_tokens=1, **GREEDY))[0]
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= 384 - 32
    assert tail.num_cached_tokens >= 224
    right = reference.states(path, long)[:, IDS]
    for output, expected in ((cold, right), (warm, right), (tail, reference.states(path, other)[:, IDS])):
        states = states_of(output)
        assert states.token_ids.tolist() == output.prompt_token_ids
        reference.assert_states(states.hidden_states, expected)


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ("last", [99]),
        ({"start": -3}, [97, 98, 99]),
        (slice(10, 40), list(range(10, 40))),
        ([5, 99, 5, -100], [5, 99, 5, 0]),
    ],
)
def test_only_the_chosen_tokens_are_stored(llm: LLM, path: str, tokens: Any, kept: list[int]) -> None:
    ids = prompt(100, 3)
    states = next(llm.extract([ids], tokens=tokens, layers=[2, 5, 2]))
    assert states.token_ids.tolist() == [ids[p] for p in kept]
    assert states.layer_ids == (2, 5, 2)
    reference.assert_states(states.hidden_states, reference.states(path, ids)[kept][:, [2, 5, 2]])


def test_float8_and_float16_storage(llm: LLM, path: str) -> None:
    ids = prompt(50, 4)
    right = reference.states(path, ids)[:, IDS]
    half = next(llm.extract([ids], dtype="float16"))
    assert half.hidden_states.dtype == torch.float16
    reference.assert_states(half.hidden_states, right, 1e-3)
    eighth = next(llm.extract([ids], dtype="float8_e4m3fn"))
    assert eighth.hidden_states.dtype == torch.float8_e4m3fn
    reference.assert_states(eighth.float(), right, 0.05)


def test_output_tokens_are_kept_when_asked_for_and_the_text_stays_the_same(llm: LLM, path: str) -> None:
    ids = prompt(40, 5)
    with LLM(path, skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=32 << 20) as plain:
        expected = plain.generate([ids], SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY))[0].outputs[
            0
        ]
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, kv_transfer_params={"include_output_tokens": True}, **GREEDY
    )
    output = llm.generate([ids], params)[0]
    assert output.outputs[0].token_ids == expected.token_ids
    states = states_of(output)
    sequence = ids + expected.token_ids[:-1]
    assert states.token_ids.tolist() == sequence
    reference.assert_states(states.hidden_states, reference.states(path, sequence)[:, IDS])
    prompt_only = llm.generate([ids], SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY))[0]
    assert len(states_of(prompt_only)) == len(ids)


def test_several_sequences_have_a_handle_each(llm: LLM, path: str) -> None:
    params = SamplingParams(n=3, max_tokens=2, temperature=1.0, seed=1, detokenize=False, ignore_eos=True)
    output = llm.generate([prompt(20, 6)], params)[0]
    handles = [o.kv_transfer_params["hidden_states_path"] for o in output.outputs if o.kv_transfer_params]
    assert len(set(handles)) == 3
    assert all(len(reader.open(h, timeout=0)) == 20 for h in handles)


def test_max_tokens_0_generates_nothing(llm: LLM) -> None:
    output = llm.generate([prompt(20, 6)], SamplingParams(max_tokens=0, **GREEDY))[0]
    assert output.outputs[0].token_ids == []
    assert len(states_of(output)) == 20


def test_records_carry_the_names_that_were_given(llm: LLM, folder: Path) -> None:
    outputs = llm.generate(
        [prompt(5), prompt(6)], SamplingParams(max_tokens=1, **GREEDY), request_ids=["first", "second"]
    )
    assert [o.kv_transfer_params for o in outputs] == [
        {"hidden_states_path": f"{folder}/{name}.safetensors"} for name in ("first", "second")
    ]
    assert states_of(outputs[1]).request_id == "second"
    assert not [name for name in leftovers(folder) if name.endswith((".lock", ".error", ".tmp"))]


def test_an_abort_at_any_moment_frees_the_blocks_and_publishes_nothing(llm: LLM, folder: Path) -> None:
    for delay in (0.0, 0.001, 0.004, 0.01, 0.03, 0.1):
        before = set(leftovers(folder))
        prompts = [prompt(450, seed) for seed in range(100, 112)]  # more than fits: some wait
        iterator = llm.extract(prompts, request_ids=[f"gone-{delay}-{i}" for i in range(12)])
        taken = next(iterator)
        time.sleep(delay)
        iterator.close()
        settle(llm)
        new = set(leftovers(folder)) - before
        assert f"{taken.request_id}.safetensors" in new
        for name in new:  # complete ones may be there; nothing else may
            assert name.endswith(".safetensors"), name
            assert len(reader.open(folder / name, timeout=0)) == 450
    assert next(llm.extract([prompt(10)])).hidden_states.shape == (10, 4, 64)


def test_an_abort_in_the_middle_of_a_prefill_leaves_no_lock(llm: LLM, folder: Path) -> None:
    scheduler = scheduler_of(llm)
    before = set(leftovers(folder))

    def begin_and_abort() -> None:
        engine = vllm_of(llm).llm.llm_engine
        params = vllm_of(llm)._sampling_params(max_tokens=1, detokenize=False)
        engine.add_request("partial", {"prompt_token_ids": prompt(400, 9)}, params)
        engine.step()
        (request,) = scheduler.requests.values()
        assert 0 < request.num_computed_tokens < 400
        assert [n for n in leftovers(folder) if n.endswith(".lock")]
        engine.abort_request(["partial"])

    vllm_of(llm).call(begin_and_abort)
    settle(llm)
    assert set(leftovers(folder)) == before


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"layers": [3]}, "kv_transfer_params.layers"),
        ({"tokens": [500]}, "kv_transfer_params.tokens"),
        ({"hidden_states_path": "/etc/x"}, "kv_transfer_params.hidden_states_path"),
        ({"dtype": "int8"}, "kv_transfer_params.dtype"),
    ],
)
def test_a_wrong_wish_is_refused_before_it_runs_and_by_the_connector_too(
    llm: LLM, folder: Path, wish: dict[str, Any], named: str
) -> None:
    params = SamplingParams(max_tokens=1, kv_transfer_params=wish, **GREEDY)
    with pytest.raises(InvalidInputError, match=named):
        llm.generate([prompt(20)], params)

    # As from a client of vLLM's own server, where nobody checks before.
    engine = vllm_of(llm).llm.llm_engine

    def run() -> Any:
        theirs = vllm_of(llm)._sampling_params(
            max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": wish}
        )
        engine.add_request("wrong", {"prompt_token_ids": prompt(20)}, theirs)
        outputs = []
        while not outputs:
            outputs = engine.step()
        return outputs[0].kv_transfer_params

    answer = vllm_of(llm).call(run)
    assert named in answer["error"]
    with pytest.raises(ExtractionError, match=named.replace(".", r"\.")) as caught:
        reader.open(answer["hidden_states_path"], timeout=10)
    assert caught.value.kind == "invalid_input"
    assert not os.path.exists(answer["hidden_states_path"])
    settle(llm)
    reader.delete(answer["hidden_states_path"])


def test_embeddings_and_names_that_leave_the_folder_are_refused(llm: LLM, folder: Path) -> None:
    connector = scheduler_of(llm).connector
    for request_id, token_ids, named in (
        ("plain", None, "prompt_embeds"),
        ("../../etc/x", [1, 2], "request_id"),
        ("a/b", [1, 2], "request_id"),
    ):
        request = SimpleNamespace(
            request_id=request_id, prompt_token_ids=token_ids, sampling_params=None, kv_transfer_params=None
        )
        connector.on_new_request(request)
        entry = connector._entries.pop(request_id)
        assert named in entry.refusal
        assert Path(entry.path).parent == folder


def test_a_full_disk_fails_that_request_and_the_engine_lives(llm: LLM, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small file system")
    sink = writer_of(llm)._sink
    usual = sink.storage_path
    sink.storage_path = tmp_path
    try:
        with pytest.raises(ExtractionError, match="make room") as caught:
            next(llm.extract([prompt(400, 7)]))
        assert caught.value.kind == "storage_full"
        assert not [name for name in os.listdir(tmp_path) if not name.startswith(".layertap-")]
        small = llm.generate([prompt(10)], SamplingParams(max_tokens=1, **GREEDY), on_error="return")[0]
        assert (tmp_path / f"{small.request_id}.safetensors").is_file()
    finally:
        sink.storage_path = usual
        settle(llm)
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_staging_stays_under_its_ring_and_blocks_do_not_run_out(llm: LLM) -> None:
    before = len(os.listdir("/proc/self/fd"))
    lengths = [(i * 37) % 480 + 1 for i in range(300)]
    count = 0
    for states, length in zip(llm.extract(prompt(n, n) for n in lengths), lengths, strict=True):
        assert len(states) == length
        count += 1
    assert count == 300
    stats = writer_of(llm).producer.stats()
    assert stats["staging_bytes"] <= 64 << 10
    settle(llm)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_wrong_prompts_are_told_before_they_run(llm: LLM) -> None:
    for wrong, named in (([VOCAB + 5], r"prompts\[1\]\[0\]"), ([1] * 600, "max_model_len"), ([], "prompt")):
        begun = writer_of(llm).producer.stats()["requests_completed"]
        with pytest.raises(InvalidInputError, match=named):
            llm.generate([prompt(5), wrong], SamplingParams(max_tokens=1, **GREEDY))
        settle(llm)
        assert (
            writer_of(llm).producer.stats()["requests_completed"] == begun
        )  # the right one has not run either
    with pytest.raises(InvalidInputError, match="request_id"):
        llm.generate([[1]], SamplingParams(max_tokens=1, **GREEDY), request_ids=["../x"])


def test_a_prompt_that_cannot_be_sent_to_the_engine_leaves_nothing_that_it_waits_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm._vllm._engine  # type: ignore[attr-defined]

    def refuse(request: object) -> None:
        raise TypeError("not serializable")  # as vLLM's encoder does, after it has noted the request

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine_core, "add_request", refuse)
        with pytest.raises(ExtractionError, match="not serializable"):
            llm.generate([prompt(5)], SamplingParams(max_tokens=1, **GREEDY))
    assert not engine.has_unfinished_requests()
    mixed = [5, np.int64(6), 7]
    (output,) = llm.generate([mixed], SamplingParams(max_tokens=1, **GREEDY))
    assert output.prompt_token_ids == [5, 6, 7]
    settle(llm)


def test_unknown_keywords_are_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match="max_model_length"):
        LLM(path, engine="vllm", layers=[1], max_model_length=5)
    with pytest.raises(InvalidInputError, match="norm"):
        LLM(path, engine="vllm", layers="norm")
    with pytest.raises(InvalidInputError, match="kv_connector"):
        LLM(path, engine="vllm", layers=[1], kv_transfer_config={"kv_connector": "MemoryConnector"})
