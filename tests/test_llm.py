"""The Python API: what it returns, what it refuses, and that it leaves nothing running."""

from __future__ import annotations

import gc
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
import tiny_models
from layertap import LLM, ExtractionError, InvalidInputError, SamplingParams, UnsupportedModelError, reader
from layertap.engine.collector import OutputCollector
from layertap.engine.loop import EngineClosedError
from layertap.engine.request import Request
from small_jobs import all_blocks_free, file_config, wait_until
from tiny_models import random_prompt

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_generate_returns_outputs_in_order_with_complete_files(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = make_llm(layers=[1, 3], kv_transfer_config=file_config(tmp_path))
    prompts = [random_prompt(n, n) for n in (30, 2, 17)]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == prompts
    for output in outputs:
        params = output.kv_transfer_params
        assert params is not None
        assert params == output.outputs[0].kv_transfer_params
        record = reader.open(params["hidden_states_path"], timeout=0)
        assert record.token_ids.tolist() == output.prompt_token_ids
        assert record.hidden_states.shape == (len(output.prompt_token_ids), 2, 64)


def test_several_sequences_of_one_prompt_each_have_a_handle(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = make_llm(kv_transfer_config=file_config(tmp_path))
    params = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
    (output,) = llm.generate([random_prompt(9)], params)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    paths = [c.kv_transfer_params["hidden_states_path"] for c in output.outputs if c.kv_transfer_params]
    assert len(set(paths)) == 3
    assert output.kv_transfer_params == output.outputs[0].kv_transfer_params
    again = llm.generate([random_prompt(9)], params)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


@pytest.mark.parametrize("block_size", [4, 16])
def test_preemption_changes_neither_text_nor_states(block_size: int, make_llm: Callable[..., LLM]) -> None:
    prompts = [random_prompt(20, seed) for seed in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    roomy = make_llm(layers=[0, 5], block_size=block_size)
    right = [
        s.hidden_states for s in roomy.extract(prompts, sampling_params=params, include_output_tokens=True)
    ]
    per_token = 5 * 2 * 2 * 16 * 4 + 2 * 64 * 4
    tight = make_llm(
        layers=[0, 5],
        block_size=block_size,
        max_model_len=64,
        kv_cache_memory_bytes=per_token * (160 + block_size),
    )
    got = list(tight.extract(prompts, sampling_params=params, include_output_tokens=True))
    assert tight.stats()["num_preemptions"] > 0
    for a, b in zip(got, right, strict=True):
        reference.assert_states(a.hidden_states, b)


def test_selection_of_layers_tokens_and_dtype(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(layers=[0, 2, 5])
    prompt = random_prompt(12)
    whole = next(llm.extract([prompt])).hidden_states
    for tokens, rows in (
        ("last", [11]),
        (slice(2, -3), list(range(2, 9))),
        ({"start": -4, "end": None}, [8, 9, 10, 11]),
        ([7, 0, 7, -1], [7, 0, 7, 11]),
    ):
        got = next(llm.extract([prompt], tokens=tokens, layers=[5, 0]))
        assert torch.equal(got.hidden_states, whole[rows][:, [2, 0]])
        assert got.token_ids.tolist() == [prompt[r] for r in rows]
    assert next(llm.extract([prompt], dtype="bfloat16")).hidden_states.dtype is torch.bfloat16
    small = next(llm.extract([prompt], dtype="float8_e4m3fn"))
    assert small.scales is not None
    assert float((small.float() - whole).abs().max() / whole.abs().max()) < 0.07


def test_logprobs_and_prompt_logprobs(make_llm: Callable[..., LLM], tiny: Callable[..., str]) -> None:
    llm = make_llm(max_num_batched_tokens=8)
    prompt = random_prompt(20)
    (output,) = llm.generate(
        [prompt], SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=0)
    )
    with torch.inference_mode():
        whole = [*prompt, *output.outputs[0].token_ids]
        right = reference.load(tiny("llama"))(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 20
    for i, row in enumerate(output.prompt_logprobs[1:]):
        assert row is not None
        assert abs(row[prompt[i + 1]].logprob - float(right[i, prompt[i + 1]])) < 1e-4
    assert output.outputs[0].logprobs is not None
    for i, row in enumerate(output.outputs[0].logprobs):
        token = output.outputs[0].token_ids[i]
        assert abs(row[token].logprob - float(right[19 + i, token])) < 1e-4
        assert row[token].rank == 1


def test_stop_strings_end_the_text_before_them(smollm2: LLM) -> None:
    prompt = "Count with me: one, two, three, four,"
    free = smollm2.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0]
    word = free.text.split()[2]
    stopped = smollm2.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0, stop=word))[0].outputs[
        0
    ]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == word
    assert stopped.text == free.text[: free.text.index(word)]


CONNECTOR = '''
from layertap.connectors.base import KVConnectorBase

class CountingConnector(KVConnectorBase):
    """Takes the norm of each sequence's first tapped layer, and keeps no file."""

    norms = {}

    def register_kv_caches(self, kv_caches):
        (self.cache,) = kv_caches.values()
        self.done = set()

    def request_finished(self, request, block_ids):
        n = len(request.prompt_token_ids)
        size = self.engine_info.block_size
        slots = [block_ids[i // size] * size + i % size for i in range(n)]
        rows = self.cache.reshape(-1, *self.cache.shape[2:])[slots]
        self.norms[request.request_id] = float(rows[:, 0].norm())
        self.done.add(request.request_id)
        return True, {"norm": self.norms[request.request_id]}

    def get_finished(self, finished_req_ids):
        done, self.done = self.done, set()
        return done, None
'''


def test_a_users_own_connector_from_a_file_works(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    file = tmp_path / "my_connector.py"
    file.write_text(CONNECTOR)
    config = {
        "kv_connector": "CountingConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": str(file),
    }
    llm = make_llm(layers=[2], kv_transfer_config=config)
    prompts = [random_prompt(n, n) for n in (5, 40)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=0))
    right = [s.hidden_states[:, 0].norm() for s in make_llm(layers=[2]).extract(prompts)]
    for output, norm in zip(outputs, right, strict=True):
        assert output.kv_transfer_params is not None
        assert output.kv_transfer_params["norm"] == pytest.approx(float(norm), rel=1e-5)
    wait_until(lambda: all_blocks_free(llm))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_batch_tokens": 1}, "max_num_batch_tokens.*did you mean 'max_num_batched_tokens'"),
        ({"layers": [6]}, "layers: got 6; allowed: layer ids from 0 to 5"),
        ({"layers": "first"}, "layers: got 'first'"),
        ({"layers": None, "kv_transfer_config": {"kv_connector": "FileConnector"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_connector": "FilConnector"}}, "FileConnector"),
        ({"kv_transfer_config": {"kv_connectr": "FileConnector"}}, "kv_connector"),
        ({"kv_transfer_config": file_config("/proc/nowhere")}, "/proc/nowhere"),
        ({"max_model_len": 5000}, "max_model_len: got 5000; allowed: at most 1024"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes: got 10; allowed: at least"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"tensor_parallel_size": 2}, "engine='vllm'"),
        ({"engine": "tensorrt"}, "engine: got 'tensorrt'; allowed: 'torch' or 'vllm'"),
        ({"quantization": "fp8"}, "quantization: .*engine='vllm' takes vLLM's own"),
        ({"data_parallel_size": 2}, "data_parallel_size: got 2; allowed: 1 here"),
        ({"speculative_config": {"method": "eagle3"}, "layers": None}, "extract_hidden_states"),
        ({"extract_only": True, "layers": None}, "extract_only"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], message: str, make_llm: Callable[..., LLM]
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_llm(**arguments)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_its_engine_is_refused_with_what_to_install(tiny: Callable[..., str]) -> None:
    with pytest.raises(InvalidInputError, match=r"engine: got 'vllm'; allowed: 'torch' .*layertap\[vllm\]"):
        LLM(tiny("llama"), engine="vllm", layers=[1])


@pytest.mark.parametrize("model", ["/nowhere", "./nothing.gguf"])
def test_an_unreadable_model_is_named(model: str) -> None:
    with pytest.raises(InvalidInputError, match="model: got"):
        LLM(model, layers=[0])


def test_a_folder_with_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="model"):
        LLM(str(tmp_path), layers=[0])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidInputError, match="weights"):
        LLM(str(tmp_path), layers=[0], skip_tokenizer_init=True)


def test_an_encoder_decoder_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, d_kv=16, vocab_size=100)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        LLM(str(tmp_path), layers=[0], skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt"),
        ("text", "tokenizer"),
        (
            [1, 2, tiny_models.VOCAB],
            rf"prompts\[1\]\[2\]: got {tiny_models.VOCAB}; allowed: token ids from 0",
        ),
        ([-1], r"prompts\[1\]\[0\]"),
        ([1] * 600, "at most 512 tokens"),
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_tokens": [1]}, "prompt"),
        ({"prompt_embeds": [[0.0]]}, "embeddings are not supported"),
        (3, "prompt"),
    ],
)
def test_wrong_prompts_are_named_and_nothing_runs(
    prompt: Any, message: str, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm()
    with pytest.raises(InvalidInputError, match=message):
        llm.generate([[1, 2], prompt] if prompt != [] else prompt, GREEDY)
    assert llm.stats()["num_steps"] == 0


def test_the_other_prompts_of_a_batch_still_run(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    got = list(llm.extract([[1, 2], [10**6], [3, 4, 5]], on_error="return"))
    assert [type(g).__name__ for g in got] == ["HiddenStates", "ExtractionError", "HiddenStates"]
    assert "token ids from 0" in str(got[1])
    iterator = llm.extract([[1, 2], [10**6], [3]])
    assert next(iterator).token_ids.tolist() == [1, 2]
    with pytest.raises(InvalidInputError, match="token ids from 0"):
        next(iterator)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"layers": [1]}, "a subset of the served layers 0,2"),
        ({"tokens": [99]}, "positions from -3 to 2"),
        ({"tokens": "first"}, "tokens"),
        ({"dtype": "int4"}, "dtype"),
    ],
)
def test_a_wrong_selection_is_named(
    selection: dict[str, Any], message: str, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(layers=[0, 2])
    with pytest.raises(InvalidInputError, match=message):
        list(llm.extract([[1, 2, 3]], **selection))


def test_a_step_that_fails_fails_its_requests_and_no_others(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(block_size=4)
    runner = llm._core.runner
    execute = runner.execute

    def fail_once(scheduled: Any) -> Any:
        runner.execute = execute  # type: ignore[method-assign]
        raise RuntimeError("out of memory")

    runner.execute = fail_once  # type: ignore[method-assign]
    prompt = random_prompt(20)
    with pytest.raises(ExtractionError, match="out of memory"):
        llm.generate([prompt], GREEDY)
    wait_until(lambda: all_blocks_free(llm))
    got = next(llm.extract([prompt]))
    assert llm.stats()["prefix_cache_hits"] == 0
    assert torch.isfinite(got.hidden_states).all()


def test_close_ends_threads_and_refuses_more_work(make_llm: Callable[..., LLM]) -> None:
    before = threading.active_count()
    with make_llm() as llm:
        list(llm.extract([[1, 2, 3]]))
        assert threading.active_count() > before
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    with pytest.raises(EngineClosedError):
        llm.generate([[1, 2, 3]])
    llm.close()


def test_extract_reads_prompts_only_as_far_ahead_as_the_buffer_allows(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    taken = 0

    def prompts() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield random_prompt(10, taken)

    per_prompt = 10 * 6 * 64 * 4
    iterator = llm.extract(prompts(), buffer_bytes=5 * per_prompt)
    for _ in range(20):
        next(iterator)
    assert taken <= 20 + 6
    iterator.close()
    wait_until(lambda: all_blocks_free(llm))


def test_texts_are_tokenized_together_as_one_by_one(smollm2: LLM) -> None:
    tokenizer = smollm2.prompt_tokenizer
    texts = [f"Café no. {i} — \n\tlayers of 表面 {i * i}" * (300 * (i % 3) + 1) for i in range(20)]
    assert sum(map(len, texts)) > 100_000
    assert list(tokenizer.several(texts)) == [tokenizer(text) for text in texts]


def test_greedy_text_of_the_real_model_equals_transformers(smollm2: LLM) -> None:
    import transformers

    subjects = [
        "rivers",
        "bread",
        "the moon",
        "bicycles",
        "bees",
        "a library",
        "glass",
        "winter",
        "trains",
        "salt",
    ]
    prompts = [f"A short text about {s}:" for s in subjects] + [
        f"My favourite thing about {s} is" for s in subjects
    ]
    ours = smollm2.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2._core.hf_path, dtype=torch.float32)
    tokenizer = smollm2.get_tokenizer()
    for i, (prompt, output) in enumerate(zip(prompts, ours, strict=True)):
        got = output.outputs[0].token_ids
        inputs = tokenizer(prompt, return_tensors="pt")
        n = inputs["input_ids"].shape[1]
        # Greedy decoding takes the most likely token after each prefix: one forward over the text shows all.
        with torch.inference_mode():
            whole = torch.cat([inputs["input_ids"], torch.tensor([got])], dim=1)
            assert model(input_ids=whole).logits[0, n - 1 : -1].argmax(-1).tolist() == got
        if i == 0:
            right = model.generate(**inputs, max_new_tokens=64, do_sample=False, pad_token_id=0)[0]
            assert got == right[n:].tolist()
        text = tokenizer.decode(got, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert output.outputs[0].text == text


@pytest.mark.parametrize(
    "prompt", ["half \ud800 a pair", {"messages": [{"role": "user", "content": "\udcff"}]}]
)
def test_text_that_is_no_valid_unicode_is_named(prompt: Any, smollm2: LLM) -> None:
    with pytest.raises(InvalidInputError, match="valid Unicode"):
        smollm2.generate([prompt], GREEDY)


def test_finished_requests_go_without_the_garbage_collector(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = make_llm(layers=[1, 3], kv_transfer_config=file_config(tmp_path))
    prompts = [random_prompt(9, seed) for seed in range(5)]
    llm.generate(prompts, GREEDY)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, Request | OutputCollector) for o in gc.get_objects())
        llm.generate(prompts, GREEDY)
        wait_until(lambda: not llm._core.requests)
        after = sum(isinstance(o, Request | OutputCollector) for o in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before


def test_extract_takes_arrays_and_dtypes(make_llm: Callable[..., LLM], tiny: Callable[..., str]) -> None:
    llm = make_llm(tiny("llama"), layers=[0, 1, 2])
    prompt = [3, 4, 5, 6]
    (plain,) = llm.extract([prompt], layers=[2, 0], tokens=[0, 3], dtype="bfloat16")
    for layers in (np.array([2, 0]), torch.tensor([2, 0]), (2, 0)):
        for tokens in (np.array([0, 3]), torch.tensor([0, 3]), (0, 3)):
            (record,) = llm.extract([prompt], layers=layers, tokens=tokens, dtype=torch.bfloat16)
            assert record.hidden_states.dtype == torch.bfloat16
            assert torch.equal(record.hidden_states, plain.hidden_states)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"layers": [7]}, "^layers: got 7"),
        ({"tokens": [True]}, r"^tokens: got \[True\]"),
        ({"tokens": "first"}, "^tokens: got 'first'"),
        ({"dtype": torch.int8}, "^dtype: got 'int8'"),
        ({"include_output_tokens": 3}, "^include_output_tokens: got 3"),
    ],
)
def test_extract_names_its_own_arguments(
    wrong: dict[str, Any], told: str, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    llm = make_llm(tiny("llama"), layers=[0, 1, 2])
    with pytest.raises(InvalidInputError, match=told):
        llm.extract([[1, 2]], **wrong)


def test_of_several_prompts_the_one_that_is_too_long_is_named(
    make_llm: Callable[..., LLM], tiny: Any
) -> None:
    llm = make_llm(tiny("llama"), layers=[1], max_model_len=32)
    with pytest.raises(InvalidInputError, match=r"^prompts\[1\]: got '40 tokens'"):
        llm.generate([[3, 4], [5] * 40], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidInputError, match=r"^prompt: got '40 tokens'"):
        llm.generate([[5] * 40], SamplingParams(max_tokens=1))
