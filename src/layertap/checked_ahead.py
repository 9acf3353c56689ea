"""What shows of a list of prompts at a look, told by ``LLM.extract`` before the first one is computed.

``LLM.extract`` takes prompts without an end, so it cannot check them all first, as ``LLM.generate`` does. Nor
are texts tokenized ahead, or ids compared with the vocabulary: that is work for each token, for which the
engine would wait. Form and number of token ids cost about a microsecond a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from layertap.errors import InvalidInputError
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection

if TYPE_CHECKING:
    from layertap.llm import LLM

MOST_PROMPTS = 10_000
"""Longer lists are checked prompt by prompt, when each one's turn comes."""


def is_checked_ahead(prompts: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether going through ``prompts`` twice is cheap and takes nothing away."""
    return isinstance(prompts, list | tuple) and len(prompts) <= MOST_PROMPTS


def check_ahead(
    llm: LLM, prompts: list[Any] | tuple[Any, ...], params: SamplingParams, selection: Selection
) -> None:
    """Refuse a list with a prompt that is none, or with token ids that are too many or too few.

    Raises:
        InvalidInputError: naming the first such prompt by its place.
    """
    for index, prompt in enumerate(prompts):
        try:
            num_tokens = llm.prompt_tokenizer.look_at(prompt, f"prompts[{index}]")
            if num_tokens is not None:
                llm._check_length(num_tokens, params, selection)
        except InvalidInputError as error:
            raise of_prompt(error, index) from None


def of_prompt(error: InvalidInputError, index: int) -> InvalidInputError:
    """An error of one prompt among several, under the names that the arguments of ``LLM.extract`` have."""
    where = f"prompts[{index}]"
    field = error.field.removeprefix("kv_transfer_params.")
    if field.startswith(where):
        return error
    return InvalidInputError(where if field == "prompt" else f"{where}, {field}", error.value, error.allowed)
