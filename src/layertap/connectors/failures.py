"""What went wrong with a delivery, as its request is told."""

from __future__ import annotations

import errno

from layertap.connectors.transfer import Cancelled
from layertap.errors import ExtractionError


def aborted(request_id: str) -> ExtractionError:
    """The error of a request that was given up."""
    return ExtractionError(request_id, "aborted; nothing was published", "aborted")


def explain(request_id: str, error: Exception) -> ExtractionError:
    """The request's error for whatever went wrong with its transfer."""
    if isinstance(error, ExtractionError):
        return error
    if isinstance(error, Cancelled):
        return aborted(request_id)
    if isinstance(error, OSError):
        return storage_error(request_id, error)
    reason = f"hidden states could not be delivered: {type(error).__name__}: {error}"
    failure = ExtractionError(request_id, reason, "engine")
    failure.__cause__ = error
    return failure


def storage_error(request_id: str, error: OSError) -> ExtractionError:
    """The request's error for a sink that could not store: kind ``storage_full`` or ``storage``."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f" ({error.filename})" if error.filename else ""
    todo = "make room and send it again" if full else "check the storage and send it again"
    reason = f"hidden states could not be stored: {error.strerror or error}{where}; {todo}"
    failure = ExtractionError(request_id, reason, "storage_full" if full else "storage")
    failure.__cause__ = error
    return failure
