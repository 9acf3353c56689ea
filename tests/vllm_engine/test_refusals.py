"""States that are no states, in an engine of their own: vLLM's CPU attention multiplies what stale blocks
hold by zero, so that NaN in a freed block reaches later requests there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from layertap import LLM, ExtractionError, InvalidInputError
from vllm_engine.support import free_blocks, leftovers, settle, vllm_of

pytestmark = pytest.mark.vllm
NAN_TOKEN, ZERO_TOKEN = 7, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def llm(start: Callable[..., LLM], folder: Path) -> LLM:
    extra = {"shared_storage_path": str(folder)}
    transfer = {"kv_connector": "LayertapConnector", "kv_connector_extra_config": extra}
    llm = start("llama", layers=[0, 5], enable_prefix_caching=False, kv_transfer_config=transfer)
    core = vllm_of(llm).llm.llm_engine.engine_core.engine_core
    weight = core.model_executor.driver_worker.model_runner.model.model.embed_tokens.weight
    with torch.no_grad():
        weight[NAN_TOKEN] = float("nan")
        weight[ZERO_TOKEN] = 0
    return llm


def test_prompts_that_are_too_long_are_told_before_the_first_is_computed(llm: LLM) -> None:
    # Before the tests below, after which any later request may be given NaN.
    longest = llm.max_model_len - 1  # a token is drawn in any case
    with pytest.raises(InvalidInputError, match=rf"^prompts\[1\]: got '{longest + 1} tokens'"):
        llm.extract([[20] * longest, [20] * (longest + 1)])
    with pytest.raises(InvalidInputError, match=r"^prompts\[1\], tokens: got 2; allowed: positions"):
        llm.extract([[20] * 3, [20] * 2], tokens=[2])
    later = llm.extract([[20] * 3, [20] * 2], tokens=[2], include_output_tokens=True, max_tokens=4)
    assert next(later).token_ids.tolist() == [20]


@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [(ZERO_TOKEN, "all_zero", "layer 0 are zero"), (NAN_TOKEN, "not_finite", "NaN or infinite")],
)
def test_they_are_never_published_and_the_engine_lives_on(
    llm: LLM, folder: Path, token: int, kind: str, words: str
) -> None:
    settle(llm)  # the test before this one ends with a request whose blocks may still be on their way back
    free = free_blocks(llm)
    before = set(leftovers(folder))
    with pytest.raises(ExtractionError, match=words) as caught:
        next(llm.extract([[token] * 40]))
    assert caught.value.kind == kind
    settle(llm)
    assert set(leftovers(folder)) == before
    assert free_blocks(llm) == free
    both = llm.extract([[token] * 10, [20] * 32], on_error="return")
    assert isinstance(next(both), ExtractionError)
    # The later request runs; whether vLLM gives it NaN out of the other's old block is vLLM's affair.
    assert next(both) is not None
