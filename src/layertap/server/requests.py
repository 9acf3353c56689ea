"""The bodies of requests. Names are OpenAI's and vLLM's; nothing that was sent is dropped in silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

_INT64 = 2**63 - 1
_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
KVTransferParams = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "layers": {"description": "a subset of the served layer ids, in the order wanted"},
                        "tokens": {"description": "'all', 'last', {'start': a, 'end': b}, or positions"},
                        "include_output_tokens": {"type": "boolean"},
                        "dtype": {"enum": ["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"]},
                        "inline": {"type": "boolean"},
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
Unused = Annotated[
    Any, Field(default=None, description="accepted for OpenAI's and vLLM's clients; no effect")
]


class Body(BaseModel):
    """A request's body: types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ModelBody(Body):
    model: str | None = Field(default=None, description="a served model's id; null is the first one")


class Sampling(ModelBody):
    """What completions and chat have in common."""

    n: int | None = Field(default=1, ge=1, le=128)
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy; null is 1")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(default=0, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = Field(default=None, description="comes back in the answer's id; names no file")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    kv_transfer_params: KVTransferParams = None

    # Refused unless they leave things as they are: see layertap.server.sampling.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None

    user: Unused
    metadata: Unused
    store: Unused
    service_tier: Unused
    safety_identifier: Unused
    prompt_cache_key: Unused
    session_id: Unused
    spaces_between_special_tokens: Unused


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: PromptField
    max_tokens: int | None = Field(default=None, ge=0, description="null is 16; 0 only prefills")
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = False
    add_special_tokens: bool | None = True
    best_of: int | None = None
    suffix: str | None = None


class Template(ModelBody):
    """How chat messages become a prompt."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampling, Template):
    """``POST /v1/chat/completions`` and ``/v1/chat/completions/render``."""

    max_tokens: int | None = Field(default=None, ge=0, description="null: as many as fit")
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = False
    tool_choice: Any = None

    parallel_tool_calls: Unused
    reasoning_effort: Unused
    include_reasoning: Unused
    verbosity: Unused
    return_token_offsets: Unused


class TokenizeRequest(Body):
    """``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ModelBody):
    """``POST /detokenize``."""

    tokens: Annotated[Any, WithJsonSchema(_IDS)]
