"""From a request's body to sampling parameters; what the engine cannot do is refused by name."""

from __future__ import annotations

from typing import Any

from layertap.errors import InvalidInputError
from layertap.sampling_params import SamplingParams
from layertap.server.requests import ChatRequest, CompletionRequest, Sampling

MAX_STOP_STRINGS = 64
DEFAULT_COMPLETION_TOKENS = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "structured_outputs": ({},),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "suffix": ("",),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "chat_template": (),
}
"""OpenAI's and vLLM's fields that the engine has no counterpart for, and the values that ask for nothing."""


def refuse_unsupported(body: Sampling) -> None:
    """Raises:
    InvalidInputError: a field asks for something that the engine cannot do.
    """
    given = body.model_fields_set
    for name, neutral in _NEUTRAL.items():
        if name not in given:
            continue
        value = getattr(body, name)
        if value is not None and value not in neutral:
            allowed = " or ".join(repr(v) for v in (*neutral, None))
            raise InvalidInputError(name, value, f"{allowed}: this server does not support it")


def sampling_params(
    body: CompletionRequest | ChatRequest,
    num_prompt_tokens: int,
    kv_transfer_params: dict[str, Any] | None,
    max_model_len: int,
    max_logprobs: int,
) -> SamplingParams:
    """The engine's parameters for one prompt of this request.

    Raises:
        InvalidInputError: naming the field that is wrong.
    """
    room = max_model_len - num_prompt_tokens
    if isinstance(body, CompletionRequest):
        asked = body.max_tokens
        name = "max_tokens"
        default = min(DEFAULT_COMPLETION_TOKENS, max(1, room))
        logprobs = body.logprobs
        prompt_logprobs = body.logprobs if body.echo else None
        logprobs_field = "logprobs"
    else:
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        default = max(1, room)
        if body.top_logprobs and not body.logprobs:
            raise InvalidInputError("top_logprobs", body.top_logprobs, "0 or null unless logprobs is true")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt_logprobs = None
        logprobs_field = "top_logprobs"
    if num_prompt_tokens > max_model_len:
        raise InvalidInputError(
            "prompt", f"{num_prompt_tokens} tokens", f"at most {max_model_len} tokens (max_model_len)"
        )
    if asked is not None and asked > max(1, room):
        raise InvalidInputError(
            name,
            asked,
            f"at most {max(1, room)}: max_model_len is {max_model_len}, the prompt has {num_prompt_tokens}",
        )
    max_tokens = default if asked is None else asked
    if body.prompt_logprobs is not None:
        prompt_logprobs = max(body.prompt_logprobs, prompt_logprobs or 0)
    for field, count in ((logprobs_field, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > max_logprobs:
            raise InvalidInputError(field, count, f"at most {max_logprobs} (--max-logprobs)")
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidInputError("min_tokens", body.min_tokens, f"at most max_tokens, which is {max_tokens}")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOP_STRINGS:
        raise InvalidInputError("stop", f"{len(body.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    return SamplingParams(
        n=body.n or 1,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=body.top_k or 0,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        kv_transfer_params=kv_transfer_params,
    )
