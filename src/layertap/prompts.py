"""What users call a prompt, turned into token ids."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layertap.errors import InvalidInputError

TokenArray = np.ndarray[Any, np.dtype[np.int64]]
Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
ALLOWED = (
    "a string, a list of token ids, {'prompt_token_ids': [...]}, {'prompt': '...'}, {'messages': [...]} or "
    "a list of chat messages with 'role' and 'content'"
)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    text: str | None
    token_ids: list[int]
    """Integers all, bools none, in a list that nobody else holds."""


def is_single(prompts: Any) -> bool:
    """True if ``prompts`` is one prompt, not a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    first = prompts[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return True
    return isinstance(first, Mapping) and "role" in first


def as_list(prompts: Any) -> list[Any]:
    """One or many prompts as a list.

    Raises:
        InvalidInputError: no prompt at all, or something that is none.
    """
    if is_single(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        if not prompts:
            raise InvalidInputError("prompts", prompts, "at least one prompt")
        return list(prompts)
    if hasattr(prompts, "__iter__") and not isinstance(prompts, bytes):
        return list(prompts)
    raise InvalidInputError("prompts", prompts, ALLOWED)


class PromptTokenizer:
    """Turns prompts into token ids with the model's tokenizer, if it has one."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def __call__(self, prompt: Any, field: str = "prompt") -> TokenizedPrompt:
        """Tokenize one prompt.

        Raises:
            InvalidInputError: it is none of the allowed forms, is empty, or needs a tokenizer that is not
            there.
        """
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids", "messages"}
            given = [k for k in ("prompt_token_ids", "messages", "prompt") if prompt.get(k) is not None]
            if "prompt_embeds" in prompt:
                raise InvalidInputError(
                    f"{field}.prompt_embeds", "...", "token ids or text: embeddings are not supported"
                )
            if not given:
                raise InvalidInputError(
                    field, dict(prompt), f"an object with one of {', '.join(sorted(known))}"
                )
            key = given[0]
            if key == "prompt_token_ids":
                return TokenizedPrompt(prompt.get("prompt"), self._ids(prompt[key], f"{field}.{key}"))
            if key == "messages":
                return self._chat(prompt[key], f"{field}.{key}")
            return self._text(prompt[key], f"{field}.{key}")
        if isinstance(prompt, str):
            return self._text(prompt, field)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            if prompt and isinstance(prompt[0], Mapping):
                return self._chat(prompt, field)
            return TokenizedPrompt(None, self._ids(prompt, field))
        if hasattr(prompt, "tolist"):
            return TokenizedPrompt(None, self._ids(prompt.tolist(), field))
        raise InvalidInputError(field, prompt, ALLOWED)

    def _need(self, field: str, value: object) -> Any:
        if self.tokenizer is None:
            raise InvalidInputError(field, value, "token ids: there is no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def _text(self, text: Any, field: str) -> TokenizedPrompt:
        if not isinstance(text, str):
            raise InvalidInputError(field, text, "a string")
        ids = list(self._need(field, text)(check_text(text, field))["input_ids"])
        if not ids:
            raise InvalidInputError(field, text, "a text of at least one token")
        return TokenizedPrompt(text, ids)

    def _ids(self, ids: Any, field: str) -> list[int]:
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise InvalidInputError(field, ids, "a list of token ids")
        if not ids:
            raise InvalidInputError(field, list(ids), "at least one token id")
        if list(map(type, ids)).count(int) != len(ids):  # one look at each for all but the wrong ones
            for i, t in enumerate(ids):
                if isinstance(t, bool) or not isinstance(t, int):
                    raise InvalidInputError(f"{field}[{i}]", t, "an integer token id")
        return list(ids)

    def _chat(self, messages: Any, field: str, **template: Any) -> TokenizedPrompt:
        tokenizer = self._need(field, messages)
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidInputError(field, messages, "a non-empty list of messages")
        for i, m in enumerate(messages):
            if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or "content" not in m:
                raise InvalidInputError(f"{field}[{i}]", m, "an object with 'role' and 'content'")
        if getattr(tokenizer, "chat_template", None) is None:
            raise InvalidInputError(
                field, "chat messages", "text or token ids: this model's tokenizer has no chat template"
            )
        options = {"add_generation_prompt": True, **template}
        try:
            text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)
        except Exception as e:
            raise InvalidInputError(field, messages, f"messages that the chat template takes ({e})") from e
        # The template has written the special tokens, BOS among them; the tokenizer must not add its own.
        ids = list(tokenizer(check_text(str(text), field), add_special_tokens=False)["input_ids"])
        return TokenizedPrompt(str(text), ids)

    def chat(self, messages: Any, field: str = "messages", **template: Any) -> TokenizedPrompt:
        """Render chat messages with the model's template.

        Args:
            template: options for the template, ``add_generation_prompt`` (default True) among them.

        Raises:
            InvalidInputError: the messages are malformed, or the model has no template.
        """
        return self._chat(messages, field, **template)


def check_text(text: str, field: str) -> str:
    """The text, if a tokenizer can take it: half a surrogate pair, from a broken escape or bytes that are no
    UTF-8, is none.

    Raises:
        InvalidInputError: it holds half a surrogate pair.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InvalidInputError(
                field, text, f"valid Unicode text (position {e.start} holds half a character)"
            ) from None
    return text


def ids_of_vocabulary(ids: Sequence[int], vocab_size: int, field: str) -> TokenArray:
    """Token ids, of which there is at least one and each an integer, as an array of their own.

    Raises:
        InvalidInputError: naming the first that is no token of the model.
    """
    try:
        # A GPU waits for this, as all prompts of a call are checked before any is run: one look at each id,
        # and the fastest way from a list into an array.
        array = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
        if array.view(np.uint64).max() < vocab_size:  # a negative one is large here
            return array
    except struct.error:  # one is beyond 64 bits
        pass
    i = next(i for i, t in enumerate(ids) if not 0 <= t < vocab_size)
    raise InvalidInputError(f"{field}[{i}]", ids[i], f"token ids from 0 to {vocab_size - 1}")
