"""layertap: hidden states of language models at the speed the model can prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layertap.errors import ExtractionError, InvalidInputError, LayertapError, UnsupportedModelError
from layertap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from layertap.client import AsyncClient, Client, ServerError
    from layertap.llm import LLM
    from layertap.record import HiddenStates

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "ExtractionError",
    "HiddenStates",
    "InvalidInputError",
    "LayertapError",
    "SamplingParams",
    "ServerError",
    "UnsupportedModelError",
    "__version__",
]

_LAZY = {
    "LLM": "layertap.llm",
    "HiddenStates": "layertap.record",
    "Client": "layertap.client",
    "AsyncClient": "layertap.client",
    "ServerError": "layertap.client",
}


def __getattr__(name: str) -> Any:
    # What needs torch is imported when it is first used, so that `import layertap` and the command line
    # start at once.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'layertap' has no attribute {name!r}")
