"""The ``openai`` package against our server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from layertap import reader

from .conftest import ThreadServer


@pytest.fixture(scope="module")
def client(server: ThreadServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def path_of(thing: Any) -> str:
    path: str = thing.kv_transfer_params["hidden_states_path"]
    return path


def test_the_models_id_is_the_path_that_was_served(client: openai.OpenAI, chat_model: str) -> None:
    assert [m.id for m in client.models.list().data] == [chat_model]
    assert client.models.retrieve(chat_model).id == chat_model


def test_a_text_gets_the_path_of_a_complete_file(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="the future of", max_tokens=1, extra_body={"return_token_ids": True}
    )
    states = reader.open(path_of(answer), timeout=0)
    assert states.token_ids.tolist() == answer.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert states.hidden_states.shape == (len(states), 3, 64)
    assert states.layer_ids == (1, 3, 5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(states)


def test_token_ids_come_back_as_they_were_sent(client: openai.OpenAI, model: str) -> None:
    ids = [9, 8, 7, 6, 5]
    answer = client.completions.create(
        model=model, prompt=ids, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].prompt_token_ids == ids  # type: ignore[attr-defined]
    assert len(answer.choices[0].token_ids) == 1  # type: ignore[attr-defined]
    assert reader.open(path_of(answer)).token_ids.tolist() == ids


def test_several_prompts_with_n_each_carry_their_own_handle(client: openai.OpenAI, model: str) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    answer = client.completions.create(
        model=model, prompt=prompts, n=4, max_tokens=2, seed=3, extra_body={"return_token_ids": True}
    )
    assert [c.index for c in answer.choices] == list(range(12))
    paths = [path_of(c) for c in answer.choices]
    assert len(set(paths)) == 12
    assert path_of(answer) == paths[0]
    for i, path in enumerate(paths):
        assert reader.open(path).token_ids.tolist() == prompts[i // 4]


def test_kv_transfer_params_select_what_is_kept(client: openai.OpenAI, model: str) -> None:
    def ask(**transfer: Any) -> Any:
        answer = client.completions.create(
            model=model, prompt=[5, 6, 7, 8], max_tokens=3, extra_body={"kv_transfer_params": transfer}
        )
        return reader.open(path_of(answer))

    full = ask()
    last = ask(tokens="last", layers=[5, 1])
    assert last.layer_ids == (5, 1)
    torch.testing.assert_close(last.hidden_states[0], full.hidden_states[-1, [2, 0]])
    assert len(ask(include_output_tokens=True)) == 4 + 3 - 1
    assert ask(dtype="bfloat16").hidden_states.dtype == torch.bfloat16


@pytest.mark.parametrize("n", [1, 3])
def test_streaming_gives_the_same_text_and_a_handle_in_each_last_chunk(
    client: openai.OpenAI, model: str, n: int
) -> None:
    request: dict[str, Any] = {
        "model": model, "prompt": ["the history", "of words"], "n": n, "max_tokens": 6, "temperature": 0,
        "logprobs": 1,
    }  # fmt: skip
    whole = client.completions.create(**request)
    texts = [""] * (2 * n)
    tokens: list[list[str]] = [[] for _ in texts]
    ends: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
            if choice.finish_reason is not None:
                ends[choice.index] = path_of(choice)
                assert path_of(chunk) == path_of(choice)
    assert texts == [c.text for c in whole.choices]
    assert tokens == [c.logprobs.tokens for c in whole.choices if c.logprobs]
    assert sorted(ends) == list(range(2 * n))
    assert all(len(reader.open(p)) for p in ends.values())
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_echo_with_logprobs_covers_prompt_and_output(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="the words", max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert answer.usage is not None
    assert choice.text.startswith("the words")
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 2
    assert logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in logprobs.token_logprobs[1:])


def test_chat_renders_with_one_bos_and_carries_ids_and_handle(client: openai.OpenAI, model: str) -> None:
    # cases.md 13: the template writes BOS, and the tokenizer would add another one.
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    ids = answer.prompt_token_ids  # type: ignore[attr-defined]
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert reader.open(path_of(answer)).token_ids.tolist() == ids
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 2
    assert [len(c.top_logprobs) for c in content] == [2, 2]


def test_chat_streams(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=5, temperature=0)
    text, path, roles = "", None, []
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=5, temperature=0, stream=True
    ):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
        if choice.finish_reason:
            path = path_of(chunk)
    assert text == whole.choices[0].message.content
    assert roles == ["assistant"]
    assert path is not None
    assert len(reader.open(path))


def test_stop_strings_are_never_streamed(client: openai.OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "of the", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**request).choices[0].text
    stop = free[6:9]
    cut = free[: free.index(stop)]
    assert client.completions.create(**request, stop=stop).choices[0].text == cut
    streamed = [c.choices[0] for c in client.completions.create(**request, stop=[stop], stream=True)]
    assert "".join(c.text for c in streamed) == cut
    assert streamed[-1].finish_reason == "stop"


def test_max_tokens_0_only_prefills(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[5, 6], max_tokens=0)
    assert answer.choices[0].text == ""
    assert len(reader.open(path_of(answer))) == 2


def test_errors_arrive_as_typed_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="another", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=model, prompt=[5, VOCAB_TOO_LARGE])
    assert "0 to 319" in str(wrong.value)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 600)
    assert "max_model_len" in str(long.value)


VOCAB_TOO_LARGE = 320
