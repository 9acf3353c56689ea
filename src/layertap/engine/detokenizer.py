"""From token ids to text, as they come: whole characters only, and stop strings found across token
borders."""

from __future__ import annotations

from typing import Any

from layertap.engine.request import Request


class Detokenizer:
    """Appends to ``request.text``. Text before ``request.text_offset`` tokens is final."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def append(self, request: Request) -> None:
        """Decode what the newest tokens add; an incomplete character waits for the next token."""
        if self.tokenizer is None or not request.params.detokenize:
            return
        ids = request.output_token_ids
        skip = request.params.skip_special_tokens
        # A few tokens before the new ones give the decoder its context (spaces, bytes of one character).
        context = ids[max(0, request.text_offset - 6) : request.text_offset]
        before = self._decode(context, skip)
        after = self._decode(context + ids[request.text_offset :], skip)
        if after.endswith("�"):
            return
        request.text += after[len(before) :]
        request.text_offset = len(ids)

    def finish(self, request: Request) -> str:
        """The text with what is still incomplete."""
        if (
            self.tokenizer is None
            or not request.params.detokenize
            or request.text_offset >= len(request.output_token_ids)
        ):
            return request.text
        if isinstance(request.stop_reason, str):
            return request.text
        ids, skip = request.output_token_ids, request.params.skip_special_tokens
        context = ids[max(0, request.text_offset - 6) : request.text_offset]
        return (
            request.text
            + self._decode(context + ids[request.text_offset :], skip)[len(self._decode(context, skip)) :]
        )

    def find_stop(self, request: Request) -> str | None:
        """The first stop string in the text; the text is cut before it."""
        best: tuple[int, str] | None = None
        for stop in request.params.stop_strings:
            at = request.text.find(stop)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        request.text = request.text[: best[0]]
        return best[1]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert self.tokenizer is not None
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )
