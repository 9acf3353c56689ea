"""Whole datasets: extract to a folder, resume, verify, read for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layertap.corpus.prompts import PromptLine, read_prompts

if TYPE_CHECKING:
    from layertap.corpus.extract import CorpusResult, CorpusSummary, extract_corpus
    from layertap.corpus.records import RecordStatus, iter_records, verify_corpus

__all__ = [
    "CorpusResult",
    "CorpusSummary",
    "PromptLine",
    "RecordStatus",
    "extract_corpus",
    "iter_records",
    "read_prompts",
    "verify_corpus",
]

_LAZY = {
    "CorpusResult": "extract",
    "CorpusSummary": "extract",
    "extract_corpus": "extract",
    "RecordStatus": "records",
    "iter_records": "records",
    "verify_corpus": "records",
}


def __getattr__(name: str) -> Any:
    # These need torch, which takes seconds to import; reading prompts does not.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"layertap.corpus.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'layertap.corpus' has no attribute {name!r}")
