"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layertap.outputs import Logprob

Row = dict[int, Logprob]
_FLOOR = -9999.0  # JSON has no minus infinity, and no NaN either: max(_FLOOR, nan) is _FLOOR


def _text(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token or ""


def completion_logprobs(
    rows: Sequence[Row | None], tokens: Sequence[int], texts: Sequence[str], offset: int, as_ids: bool
) -> dict[str, Any]:
    """The ``logprobs`` of a completion.

    Args:
        rows: one for each token; None where there is nothing to predict it from (a prompt's first token).
        tokens: the chosen tokens, first in their rows.
        texts: their texts, for ``text_offset``.
        offset: characters before the first token.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for row, token, text in zip(rows, tokens, texts, strict=True):
        result["text_offset"].append(offset)
        offset += len(text)
        if row is None:
            result["tokens"].append(f"token_id:{token}" if as_ids else text)
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["tokens"].append(_text(token, row[token], as_ids))
        result["token_logprobs"].append(max(_FLOOR, row[token].logprob))
        result["top_logprobs"].append({_text(t, e, as_ids): max(_FLOOR, e.logprob) for t, e in row.items()})
    return result


def chat_logprobs(rows: Sequence[Row], tokens: Sequence[int], top: int, as_ids: bool) -> dict[str, Any]:
    """The ``logprobs`` of a chat message."""

    def entry(token: int, value: Logprob) -> dict[str, Any]:
        text = _text(token, value, as_ids)
        return {
            "token": text,
            "logprob": max(_FLOOR, value.logprob),
            "bytes": list(text.encode("utf-8", "replace")),
        }

    content = []
    for row, token in zip(rows, tokens, strict=True):
        best = [entry(t, e) for t, e in sorted(row.items(), key=lambda item: item[1].rank) if e.rank <= top]
        content.append({**entry(token, row[token]), "top_logprobs": best})
    return {"content": content}


def prompt_logprobs(rows: Sequence[Row | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(t): {"logprob": max(_FLOOR, e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for t, e in row.items()
        }
        for row in rows
    ]
