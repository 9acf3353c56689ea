"""From what a request holds to token ids, and back. Large inputs are worked on beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from layertap.errors import InvalidInputError
from layertap.prompts import PromptTokenizer, TokenizedPrompt, as_list, check_text
from layertap.server.requests import ChatRequest, TokenizeRequest

T = TypeVar("T")

MAX_PROMPTS = 4096
_INLINE = 16384
"""Characters, or token ids, up to which the work takes less time than a thread costs."""
_OWN_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "documents")
_RESERVED = {
    "chat_template", "conversation", "messages", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", *_OWN_OPTIONS,
}  # fmt: skip


class Tokenizing:
    """The HTTP side's tokenizer.

    Args:
        tokenizer: of the model; None if the server runs without one.
        vocab_size: ids from here up do not exist.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._prompts = PromptTokenizer(tokenizer)

    async def completion_prompts(self, prompt: Any, add_special_tokens: bool) -> list[TokenizedPrompt]:
        """The prompts of a completions call: a text, token ids, or a list of either.

        Raises:
            InvalidInputError: it is none of these.
        """
        items = _prompt_list(prompt)
        size = sum(len(item) for item in items if isinstance(item, str | list))
        many = len(items) > 1

        def work() -> list[TokenizedPrompt]:
            named = ((item, f"prompt[{i}]" if many else "prompt") for i, item in enumerate(items))
            return [self._one(item, name, add_special_tokens) for item, name in named]

        return await _run(work, size)

    def _one(self, item: Any, field: str, add_special_tokens: bool) -> TokenizedPrompt:
        if isinstance(item, str):
            return self._text(item, field, add_special_tokens)
        if isinstance(item, list) and not (item and isinstance(item[0], Mapping)):
            return self._prompts(item, field)
        raise InvalidInputError(field, item, "a text or a list of token ids")

    def _text(self, text: str, field: str, add_special_tokens: bool) -> TokenizedPrompt:
        if add_special_tokens:
            return self._prompts(text, field)
        self._need(field)
        return self._prompts.text(text, field, add_special_tokens=False)

    async def text(self, text: str, field: str, add_special_tokens: bool) -> TokenizedPrompt:
        """Tokenize one text.

        Raises:
            InvalidInputError: it is empty or not Unicode text, or there is no tokenizer.
        """
        return await _run(lambda: self._text(text, field, add_special_tokens), len(text))

    async def chat(self, body: ChatRequest | TokenizeRequest, messages: Sequence[Any]) -> TokenizedPrompt:
        """Render chat messages with the model's template; the template writes the special tokens.

        Raises:
            InvalidInputError: the messages or the options are wrong, or the model has no template.
        """
        adding = body.add_generation_prompt is not False
        if body.continue_final_message and adding:
            raise InvalidInputError(
                "continue_final_message", True, "false, or true together with add_generation_prompt: false"
            )
        if body.chat_template is not None:
            raise InvalidInputError(
                "chat_template", body.chat_template, "null: the model's own template is used"
            )
        options: dict[str, Any] = {}
        for name, value in (body.chat_template_kwargs or {}).items():
            if name in _RESERVED:
                raise InvalidInputError(f"chat_template_kwargs.{name}", value, "variables of the template")
            options[name] = value
        options["add_generation_prompt"] = adding
        if body.continue_final_message:
            options["continue_final_message"] = True
        if body.tools:
            options["tools"] = body.tools
        if body.documents:
            options["documents"] = body.documents
        plain = [_plain(m, f"messages[{i}]") for i, m in enumerate(messages)]
        size = sum(len(str(m.get("content", ""))) for m in plain)
        special = bool(body.add_special_tokens)

        def work() -> TokenizedPrompt:
            prompt = self._prompts.chat(plain, **options)
            if special:
                assert prompt.text is not None
                return self._text(prompt.text, "messages", True)
            if not prompt.token_ids:
                raise InvalidInputError("messages", plain, "messages that render to at least one token")
            return prompt

        return await _run(work, size)

    async def decode(self, ids: Any, field: str = "tokens") -> str:
        """The text of token ids.

        Raises:
            InvalidInputError: an id does not exist, or there is no tokenizer.
        """
        tokenizer = self._need(field)

        def work() -> str:
            checked = self._prompts.ids(ids, field)
            checked.check_vocabulary(self.vocab_size)
            return str(tokenizer.decode(checked.token_ids))

        return await _run(work, len(ids) if isinstance(ids, list) else 0)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [str(t) for t in self._need("return_token_strs").convert_ids_to_tokens(list(ids))]

    def _need(self, field: str) -> Any:
        if self.tokenizer is None:
            raise InvalidInputError(field, "...", "token ids: the server runs without a tokenizer")
        return self.tokenizer


async def _run(work: Callable[[], T], size: int) -> T:
    return work() if size <= _INLINE else await asyncio.to_thread(work)


def _prompt_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidInputError("prompt", prompt, "a text, a list of token ids, or a list of these")
    if not prompt:
        raise InvalidInputError("prompt", prompt, "at least one prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidInputError("prompt", f"{len(prompt)} prompts", f"at most {MAX_PROMPTS} in one call")
    return as_list(prompt)


def truncate(
    prompt: TokenizedPrompt, limit: int | None, side: str | None, default_side: str, max_model_len: int
) -> TokenizedPrompt:
    """Cut a prompt to ``limit`` tokens (-1: the longest that the model takes).

    Args:
        side: ``"right"`` keeps the first tokens, ``"left"`` the last ones; None takes ``default_side``.
    """
    if limit is None:
        return prompt
    if limit == 0:
        raise InvalidInputError("truncate_prompt_tokens", 0, "-1, or 1 and above")
    keep = max_model_len if limit == -1 else limit
    ids = prompt.token_ids
    if len(ids) <= keep:
        return prompt
    kept = ids[:keep] if (side or default_side) == "right" else ids[-keep:]
    return TokenizedPrompt.of(None, kept, prompt.name)


def _plain(message: Any, field: str) -> dict[str, Any]:
    """A message with its content as one string, as text models' templates expect it."""
    if not isinstance(message, Mapping):
        raise InvalidInputError(field, message, "an object with 'role' and 'content'")
    result = dict(message)
    for key, value in result.items():
        if isinstance(value, str):
            check_text(value, f"{field}.{key}")
    content = result.get("content")
    if content is None:
        result["content"] = ""
        if not result.get("tool_calls"):
            raise InvalidInputError(f"{field}.content", None, "a text")
    elif isinstance(content, list):
        result["content"] = "\n".join(_part(p, f"{field}.content[{i}]") for i, p in enumerate(content))
    elif not isinstance(content, str):
        raise InvalidInputError(f"{field}.content", content, "a text, or a list of text parts")
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_parsed_call(c, f"{field}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return result


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        text: Any = part
    elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text"):
        text = part.get("text")
    else:
        raise InvalidInputError(field, part, "{'type': 'text', 'text': ...}: only text is supported")
    if not isinstance(text, str):
        raise InvalidInputError(f"{field}.text", text, "a text")
    check_text(text, field)
    return text


def _parsed_call(call: Any, field: str) -> Any:
    """OpenAI sends arguments as JSON text; templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidInputError(field, call, "an object with 'function'")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError as e:
        raise InvalidInputError(f"{field}.function.arguments", arguments, f"valid JSON ({e})") from None
    return {**call, "function": {**function, "arguments": parsed}}
