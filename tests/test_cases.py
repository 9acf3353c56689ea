"""Faults that users of systems like this one have reported: the right result, by their number in
docs/cases.md."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import reference
import tiny_models
from layertap import LLM, ExtractionError, InvalidInputError, SamplingParams, reader
from small_jobs import all_blocks_free, extract, file_config, published, wait_until
from tiny_models import random_prompt


def test_case_1_together_alone_and_together_again(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(enable_prefix_caching=False)
    prompts = [random_prompt(n, seed=n) for n in (5, 90, 1, 33, 60, 2, 17, 120)]
    together = extract(llm, prompts)
    alone = [extract(llm, [p])[0] for p in prompts]
    again = extract(llm, prompts[::-1])[::-1]
    for p, a, b, c in zip(prompts, together, alone, again, strict=True):
        assert a.shape[0] == len(p)
        reference.assert_states(a, b)
        reference.assert_states(c, b)


def test_case_2_chunked_prefill_gives_every_row_once(make_llm: Callable[..., LLM]) -> None:
    prompts = [random_prompt(500, seed) for seed in range(3)]
    chunked = extract(make_llm(max_num_batched_tokens=128), prompts)
    whole = extract(make_llm(max_num_batched_tokens=2048), prompts)
    for a, b in zip(chunked, whole, strict=True):
        assert a.shape[0] == 500
        reference.assert_states(a, b)


def test_case_3_prefix_hits_bring_their_states(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=1024)
    prompt = random_prompt(1000)
    cold = extract(llm, [prompt])[0]
    again = extract(llm, [prompt])[0]
    other = prompt[:700] + random_prompt(200, seed=1)
    shared = extract(llm, [other])[0]
    assert llm.stats()["prefix_cache_hits"] >= 992 + 688
    assert again.shape[0] == 1000
    assert shared.shape[0] == 900
    reference.assert_states(again, cold)
    reference.assert_states(shared[:700], cold[:700])


def test_case_4_first_and_last_boundaries(make_llm: Callable[..., LLM], tiny: Callable[..., str]) -> None:
    n, prompt = 5, random_prompt(20)
    got = extract(make_llm(layers=[0, 1, n - 1, n]), [prompt])[0]
    model = reference.load(tiny("llama"))
    with torch.inference_mode():
        right = model.model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
        for column, k in enumerate((0, 1, n - 1)):
            assert reference.difference(got[:, column], right[k][0]) < 1e-5
        assert reference.difference(model.model.norm(got[:, 3]), right[n][0]) < 1e-5
    with pytest.raises(InvalidInputError, match=r"layers: got 6; allowed: layer ids from 0 to 5"):
        make_llm(layers=[n + 1])


def test_case_5_columns_come_in_the_order_asked_with_duplicates(make_llm: Callable[..., LLM]) -> None:
    prompt = random_prompt(20)
    everything = extract(make_llm(layers="all"), [prompt])[0]
    for asked in ([5, 2, 4], [2, 2, 5]):
        got = extract(make_llm(layers=asked), [prompt])[0]
        reference.assert_states(got, everything[:, asked])


def test_case_6_states_reproduce_the_real_models_logprobs(smollm2: LLM) -> None:
    text = "The Great Wall of China was built over many centuries to protect the northern borders."
    states = next(smollm2.extract(text, layers=[30]))
    path = smollm2._core.hf_path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        ours = model.lm_head(model.model.norm(states.hidden_states[:, 0])).log_softmax(-1)
        right = model(input_ids=states.token_ids[None]).logits[0].log_softmax(-1)
    assert torch.equal(ours.argmax(-1), right.argmax(-1))
    assert float((ours - right).abs().max()) < 2e-3


def test_case_7_cancelled_requests_leave_nothing(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=2, kv_transfer_config=file_config(tmp_path))
    extract(llm, [random_prompt(10)], request_ids=["warm-up"])
    descriptors = len(os.listdir("/proc/self/fd"))
    iterator = llm.extract(
        [random_prompt(400, s) for s in range(6)], request_ids=[f"cancel-{i}" for i in range(6)]
    )
    first = next(iterator)
    assert first.hidden_states.shape[0] == 400
    del first
    iterator.close()  # others are queued, in prefill, or being written
    wait_until(
        lambda: llm.stats()["num_running"] + llm.stats()["num_waiting"] + llm.stats()["num_storing"] == 0
    )
    assert all_blocks_free(llm)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    for name in published(tmp_path):
        reader.open(tmp_path / name, timeout=0)  # what is there is whole
    assert len(list(llm.extract([random_prompt(30)]))) == 1


def test_case_9_a_very_long_request_is_staged_through_a_small_ring(make_llm: Callable[..., LLM]) -> None:
    ring = {"staging_chunk_bytes": 256 << 10, "staging_ring_bytes": 512 << 10}
    llm = make_llm(
        "qwen3",
        layers=["all", "norm"] * 4,
        max_model_len=1024,
        max_num_batched_tokens=128,
        kv_transfer_config={"kv_connector": "MemoryConnector", "kv_connector_extra_config": ring},
    )
    prompt = random_prompt(1000)
    states = next(llm.extract([prompt]))
    assert states.hidden_states.nbytes > 10 * ring["staging_ring_bytes"]
    assert llm.stats()["connector"]["staging_bytes"] <= ring["staging_ring_bytes"]
    assert llm.stats()["connector"]["staging_buffers_peak"] <= 2
    reference.assert_states(states.hidden_states[:, :7], states.hidden_states[:, 21:])


def test_case_10_nan_and_zero_states_are_never_published(
    make_llm: Callable[..., LLM], tmp_path: Path, tiny: Callable[..., str]
) -> None:
    llm = make_llm(kv_transfer_config=file_config(tmp_path), block_size=4)
    embed = llm._core.verifier.model.get_input_embeddings().weight
    with torch.no_grad():
        embed[7] = float("nan")
        embed[8] = 0.0
    good = random_prompt(9)
    good = [t if t not in (7, 8) else 9 for t in good]
    outputs = llm.generate(
        [good, [5, 6, 7, 9], [8, 8, 8], good], SamplingParams(max_tokens=0), on_error="return",
        request_ids=["good", "nan", "zero", "good-again"],
    )  # fmt: skip
    assert outputs[0].error is None
    assert outputs[1].error is not None
    assert outputs[1].error.kind == "not_finite"
    assert outputs[2].error is not None
    assert outputs[2].error.kind == "all_zero"
    assert outputs[3].error is None
    assert published(tmp_path) == ["good-again.safetensors", "good.safetensors"]
    wait_until(lambda: all_blocks_free(llm))
    with pytest.raises(ExtractionError, match="nan"):
        llm.generate([[5, 6, 7, 9]], SamplingParams(max_tokens=0), request_ids=["nan"])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
def test_case_11_extraction_changes_no_text(name: str, make_llm: Callable[..., LLM]) -> None:
    prompts = [random_prompt(n, n) for n in (7, 30)]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    without = make_llm(name, layers=None).generate(prompts, params)
    llm = make_llm(name)
    with_states = llm.generate(prompts, params)
    for a, b in zip(without, with_states, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert len(a.outputs[0].token_ids) == 64
    rows = extract(llm, prompts, sampling_params=params, include_output_tokens=True)
    assert [r.shape[0] for r in rows] == [len(p) + 63 for p in prompts]


def test_case_14_large_bfloat16_values_stay_bit_equal_and_do_not_become_inf(
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(weights=torch.bfloat16, layers=[0])
    embed = llm._core.verifier.model.get_input_embeddings().weight
    with torch.no_grad():
        embed[11, 3] = 1e5
    states = next(llm.extract([[11, 12]]))
    assert states.hidden_states.dtype is torch.bfloat16
    assert torch.equal(states.hidden_states[:, 0], embed[[11, 12]])
    with pytest.raises(ExtractionError, match="float16"):
        next(llm.extract([[11, 12]], dtype="float16"))
    assert torch.isfinite(next(llm.extract([[11, 12]], dtype="float32")).hidden_states).all()


def test_case_15_last_token_only_over_many_prompts(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=64)
    prompts = [random_prompt(8, seed) for seed in range(2000)]
    count = 0
    peak = 0
    for prompt, states in zip(prompts, llm.extract(iter(prompts), tokens="last"), strict=True):
        assert states.hidden_states.shape[0] == 1
        assert states.token_ids.tolist() == prompt[-1:]
        count += 1
        peak = max(peak, threading.active_count())
    assert count == 2000
    wait_until(lambda: all_blocks_free(llm))


@pytest.mark.parametrize("side", ["left", "right"])
def test_case_18_padding_side_of_the_tokenizer_does_not_matter(smollm2: LLM, side: str) -> None:
    tokenizer = smollm2.get_tokenizer()
    before = tokenizer.padding_side
    tokenizer.padding_side = side
    try:
        short, long = "Hello there", "A much longer prompt, with many more words than the other one has. " * 4
        together = list(smollm2.extract([short, long]))
        alone = next(smollm2.extract([short]))
    finally:
        tokenizer.padding_side = before
    assert together[0].token_ids.tolist() == tokenizer(short)["input_ids"]
    reference.assert_states(together[0].hidden_states, alone.hidden_states)


def test_case_19_sizes_come_from_a_nested_text_config(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    text = tiny_models.PACKED["gemma3"]()
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=150,
        eoi_token_index=151,
        image_token_index=152,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    llm = make_llm(str(tmp_path), layers="all")
    assert llm.num_hidden_layers == 5
    prompt = [t for t in random_prompt(30) if t < 150]
    got = extract(llm, [prompt])[0]
    assert got.shape == (len(prompt), 6, 64)
    with torch.inference_mode():
        right = model.model.language_model(
            input_ids=torch.tensor([prompt]), output_hidden_states=True
        ).hidden_states
    for k in range(5):
        assert reference.difference(got[:, k], right[k][0]) < 1e-5
