"""The errors that layertap raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layertap.outputs import RequestOutput


class LayertapError(Exception):
    """Base of every error of this package that is not plain wrong input."""


class InvalidInputError(LayertapError, ValueError):
    """Wrong input: names the field, the value and what is allowed.

    Args:
        field: the name of the argument, flag or JSON field, as the user wrote it.
        value: what was given. Long values are shortened in the message.
        allowed: what would have been right, as a phrase ("an integer from 0 to 30").
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        try:
            shown = repr(value)
        except ValueError as e:  # an integer of thousands of digits, say
            shown = f"something of type {type(value).__name__} that cannot be shown ({e})"
        if len(shown) > 120:
            shown = shown[:100] + f"... ({len(shown)} characters)"
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.value, self.allowed)


class ExtractionError(LayertapError, RuntimeError):
    """Hidden states of one request could not be delivered. Nothing was published for it.

    Args:
        request_id: the request that failed.
        reason: one line that says what happened and what to do.
        kind: a short stable word for metrics and HTTP mapping: ``storage_full``, ``storage``, ``not_finite``,
            ``all_zero``, ``dtype_overflow``, ``aborted``, ``engine``.
    """

    def __init__(self, request_id: str, reason: str, kind: str = "engine") -> None:
        super().__init__(f"request {request_id}: {reason}")
        self.request_id = request_id
        self.reason = reason
        self.kind = kind
        self.outputs: list[RequestOutput] = []
        """From ``LLM.generate``: the outputs of the whole call."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.request_id, self.reason, self.kind)


class UnsupportedModelError(LayertapError, RuntimeError):
    """The model cannot be run here with a result that is known to be right. The message says why."""


class CorruptRecordError(LayertapError, ValueError):
    """A file is not a complete, intact record of hidden states. The message names the file and what is wrong.

    Args:
        path: the file.
        problem: what is wrong with it, as a phrase ("the header is cut off after 12 of 480 bytes").
    """

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


class HandleNotFoundError(LayertapError, LookupError):
    """Nothing is stored under a handle, or did not appear in time. The message names the handle and what to
    do."""
