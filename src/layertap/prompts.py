"""What users call a prompt, turned into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import numpy as np

from layertap.errors import InvalidInputError
from layertap.token_ids import TokenArray, as_array, is_clipped, plain_ints

Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
ALLOWED = (
    "a string, a list of token ids, {'prompt_token_ids': [...]}, {'prompt': '...'}, {'messages': [...]} or "
    "a list of chat messages with 'role' and 'content'"
)

_KINDS: dict[str, Literal["text", "messages", "ids"]] = {
    "prompt": "text", "messages": "messages", "prompt_token_ids": "ids",
}  # fmt: skip
_MANY_CHARACTERS = 100_000
"""From so many on, texts are tokenized in parallel: tens of milliseconds less. Below, a process that forks
later is not to hear from the tokenizer that it has used threads."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it. Made by :meth:`of`."""

    text: str | None
    token_ids: list[int]
    """In a list that nobody else holds."""
    array: TokenArray = field(compare=False, repr=False)
    """The same, but for ids beyond 64 bits."""
    name: str = field(default="prompt_token_ids", compare=False, repr=False)
    """What the user calls the ids."""

    @classmethod
    def of(cls, text: str | None, ids: Sequence[Any], name: str = "prompt_token_ids") -> TokenizedPrompt:
        """A prompt of token ids, which are copied.

        Raises:
            InvalidInputError: naming the first that is no integer.
        """
        own = plain_ints(ids, name)
        return cls(text, own, as_array(own), name)

    def __reduce__(self) -> tuple[Any, ...]:
        if is_clipped(self.array):
            return TokenizedPrompt.of, (self.text, self.token_ids, self.name)
        return _unpickled, (self.text, self.array, self.name)  # a list takes longer

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids that are no tokens of the model.

        Raises:
            InvalidInputError: naming the first one.
        """
        wrong = self.array.view(np.uint64) >= vocab_size  # a negative one is large here
        if wrong.any():
            i = int(wrong.argmax())
            raise InvalidInputError(
                f"{self.name}[{i}]", self.token_ids[i], f"token ids from 0 to {vocab_size - 1}"
            )


def _unpickled(text: str | None, array: TokenArray, name: str) -> TokenizedPrompt:
    return TokenizedPrompt(text, array.tolist(), array, name)


def is_single(prompts: Any) -> bool:
    """True if ``prompts`` is one prompt, not a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    in_a_row = getattr(prompts, "ndim", None) == 1  # array, tensor, a table's column: of ids or of prompts
    if not (in_a_row or isinstance(prompts, Sequence)) or not len(prompts):
        return False
    first = next(iter(prompts))
    if in_a_row and getattr(first, "ndim", None) == 0:
        first = first.item()
    if isinstance(first, Integral):  # numpy's are
        return not isinstance(first, bool)
    return isinstance(first, Mapping) and "role" in first


def as_iterable(prompts: Any) -> Iterable[Any]:
    """One or many prompts as something to go through.

    Raises:
        InvalidInputError: it is no prompt, and not several.
    """
    if is_single(prompts):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", None) == 0:
        raise InvalidInputError("prompts", prompts, ALLOWED)
    found: Iterable[Any] = prompts
    return found


def as_list(prompts: Any) -> list[Any]:
    """One or many prompts as a list.

    Raises:
        InvalidInputError: no prompt at all, or something that is none.
    """
    found = list(as_iterable(prompts))
    if not found:
        raise InvalidInputError("prompts", found, "at least one prompt")
    return found


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
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        kind, value, name = _form(prompt, field)
        if kind == "text":
            return self.text(value, name)
        if kind == "messages":
            return self._chat(value, name)
        return self.ids(value, name, prompt.get("prompt") if isinstance(prompt, Mapping) else None)

    def look_at(self, prompt: Any, field: str = "prompt") -> int | None:
        """Refuse what is no prompt, in a time that does not depend on its length.

        Returns:
            How many tokens it has, if it consists of token ids; whether each one is an integer is not looked
            at.

        Raises:
            InvalidInputError: it is none of the allowed forms, is an empty list, or needs a tokenizer that is
            not there.
        """
        if isinstance(prompt, TokenizedPrompt):
            return len(prompt.token_ids)
        kind, value, name = _form(prompt, field)
        if kind == "text":
            self._need(name, _string(value, name))
            return None
        if kind == "messages":
            self._need(name, value)
            _check_messages(value, name)
            return None
        if hasattr(value, "tolist"):
            return len(value) if getattr(value, "ndim", None) == 1 and len(value) else None
        return len(_id_list(value, name))

    def several(self, prompts: Sequence[Any]) -> Iterator[TokenizedPrompt]:
        """Tokenize the prompts of one call, one after the other. Long lists of texts go to the tokenizer
        together: it spreads them over the cores.

        Raises:
            InvalidInputError: see :meth:`__call__`; it names the prompt by its place among several.
        """
        names = [f"prompts[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
        all_texts = self.tokenizer is not None and all(isinstance(p, str) for p in prompts)
        if not all_texts or sum(map(len, prompts)) < _MANY_CHARACTERS:
            return (self(prompt, name) for prompt, name in zip(prompts, names, strict=True))
        texts = [check_text(text, name) for text, name in zip(prompts, names, strict=True)]
        rows = self.tokenizer(texts)["input_ids"]  # type: ignore[misc]
        return (self._tokenized(*one) for one in zip(texts, rows, names, strict=True))

    def _need(self, field: str, value: object) -> Any:
        if self.tokenizer is None:
            raise InvalidInputError(field, value, "token ids: there is no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def text(self, text: Any, field: str, **options: Any) -> TokenizedPrompt:
        """A prompt of a text.

        Args:
            options: for the tokenizer.

        Raises:
            InvalidInputError: it is empty or not Unicode text, or there is no tokenizer.
        """
        ids = self._need(field, _string(text, field))(check_text(text, field), **options)["input_ids"]
        return self._tokenized(text, ids, field)

    @staticmethod
    def _tokenized(text: str, ids: Sequence[int], field: str) -> TokenizedPrompt:
        if not ids:
            raise InvalidInputError(field, text, "a text of at least one token")
        return TokenizedPrompt.of(text, ids)

    @staticmethod
    def ids(ids: Any, field: str, text: str | None = None) -> TokenizedPrompt:
        """A prompt of token ids.

        Args:
            ids: a sequence of integers, or an array or tensor.
            text: what they spell, if it is known.

        Raises:
            InvalidInputError: there is none, or one is no integer.
        """
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        return TokenizedPrompt.of(text, _id_list(ids, field), field)

    def _chat(self, messages: Any, field: str, **template: Any) -> TokenizedPrompt:
        tokenizer = self._need(field, messages)
        _check_messages(messages, field)
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
        ids = tokenizer(check_text(str(text), field), add_special_tokens=False)["input_ids"]
        return TokenizedPrompt.of(str(text), ids)

    def chat(self, messages: Any, field: str = "messages", **template: Any) -> TokenizedPrompt:
        """Render chat messages with the model's template.

        Args:
            template: options for the template, ``add_generation_prompt`` (default True) among them.

        Raises:
            InvalidInputError: the messages are malformed, or the model has no template.
        """
        return self._chat(messages, field, **template)


def _form(prompt: Any, field: str) -> tuple[Literal["text", "messages", "ids"], Any, str]:
    """What kind of prompt it is, what it consists of, and what the user calls that.

    Raises:
        InvalidInputError: it is none of the allowed forms.
    """
    if isinstance(prompt, Mapping):
        if "prompt_embeds" in prompt:
            raise InvalidInputError(
                f"{field}.prompt_embeds", "...", "token ids or text: embeddings are not supported"
            )
        for key in ("prompt_token_ids", "messages", "prompt"):
            value = prompt.get(key)
            if value is not None:
                return _KINDS[key], value, f"{field}.{key}"
        raise InvalidInputError(field, dict(prompt), f"an object with one of {', '.join(sorted(_KINDS))}")
    if isinstance(prompt, str):
        return "text", prompt, field
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return "messages" if prompt and isinstance(prompt[0], Mapping) else "ids", prompt, field
    if hasattr(prompt, "tolist"):
        return "ids", prompt, field
    raise InvalidInputError(field, prompt, ALLOWED)


def _string(text: Any, field: str) -> str:
    if not isinstance(text, str):
        raise InvalidInputError(field, text, "a string")
    return text


def _id_list(ids: Any, field: str) -> Sequence[Any]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidInputError(field, ids, "a list of token ids")
    if not ids:
        raise InvalidInputError(field, list(ids), "at least one token id")
    return ids


def _check_messages(messages: Any, field: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidInputError(field, messages, "a non-empty list of messages")
    for i, m in enumerate(messages):
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or "content" not in m:
            raise InvalidInputError(f"{field}[{i}]", m, "an object with 'role' and 'content'")


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
