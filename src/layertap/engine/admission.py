"""At the engine's door: a request is checked against the model and the connector before any work starts."""

from __future__ import annotations

import time

from layertap.config import EngineConfig
from layertap.connectors.base import KVConnectorBase
from layertap.engine.request import Request
from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers
from layertap.outputs import RequestMetrics
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection


class Admission:
    """Builds requests. Safe to call from any thread: nothing in it changes while the engine lives.

    Args:
        has_tokenizer: whether the engine can turn tokens into text.
        eos_token_ids: tokens that end a text of this model.
        served: tapped layers; None when the engine taps nothing.
        connector: where states go; None when the engine taps nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        has_tokenizer: bool,
        eos_token_ids: frozenset[int],
        served: ServedLayers | None,
        connector: KVConnectorBase | None,
    ) -> None:
        self.extract_only = config.extract_only
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.has_tokenizer = has_tokenizer
        self.eos_token_ids = eos_token_ids
        self.served = served
        self.connector = connector

    def make_request(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, cache_salt: str = ""
    ) -> Request:
        """Check a request and build it.

        Raises:
            InvalidInputError: naming the field that is wrong.
        """
        num_tokens = len(prompt.token_ids)
        self.check_length(num_tokens, params)
        prompt.check_vocabulary(self.vocab_size)
        self._check_params(params)
        selection = self._select(request_id, num_tokens, params)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return Request(
            request_id,
            prompt,
            params,
            selection,
            eos.union(params.stop_token_ids) if params.stop_token_ids else eos,
            RequestMetrics(time.monotonic()),
            cache_salt=cache_salt.encode(),
            max_tokens=0 if self.extract_only else params.max_tokens,
        )

    def check_length(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse a prompt by its number of tokens.

        Raises:
            InvalidInputError: it is empty or too long, or leaves no room for output.
        """
        limit = self.max_model_len
        if not num_tokens:
            raise InvalidInputError("prompt", [], "at least one token")
        if num_tokens > limit:
            raise InvalidInputError(
                "prompt", f"{num_tokens} tokens", f"at most {limit} tokens (max_model_len)"
            )
        if params.max_tokens > 1 and num_tokens >= limit and not self.extract_only:
            raise InvalidInputError(
                "max_tokens", params.max_tokens, f"at most {limit - num_tokens} after this prompt"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if self.extract_only:
            if params.max_tokens > 1:
                raise InvalidInputError(
                    "max_tokens", params.max_tokens, "0 or 1: this engine runs with extract_only"
                )
            if params.logprobs is not None or params.prompt_logprobs is not None:
                raise InvalidInputError(
                    "logprobs", params.logprobs, "None: this engine runs with extract_only"
                )
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise InvalidInputError(
                "logprobs", params.logprobs, f"at most {self.vocab_size}, the vocabulary's size"
            )
        if params.stop_strings and not (self.has_tokenizer and params.detokenize):
            raise InvalidInputError("stop", params.stop, "None without a tokenizer or with detokenize=False")

    def _select(self, request_id: str, num_tokens: int, params: SamplingParams) -> Selection | None:
        if self.served is None:
            if params.kv_transfer_params:
                raise InvalidInputError(
                    "kv_transfer_params", dict(params.kv_transfer_params), "None: this engine taps no layers"
                )
            return None
        selection = Selection.parse(params.kv_transfer_params, self.served)
        selection.check_length(num_tokens)
        assert self.connector is not None
        self.connector.check_request(params.kv_transfer_params, request_id)
        return selection
