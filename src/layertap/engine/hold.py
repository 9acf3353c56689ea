"""What is computed of a call before all of it is known to be right, and not handed out until then."""

from __future__ import annotations

import weakref


class Owner:
    """Lives as long as the call that made a hold: in a local variable of it."""

    __slots__ = ("__weakref__",)


class Hold:
    """Requests that have it are computed, and nothing of them is handed out before it is released.

    It is told by plain attributes, and asks whether its owner lives: whatever interrupts the call, at
    whatever moment, no request waits for ever.
    """

    __slots__ = ("_owner", "cancelled", "released")

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.released = False
        """All of the call is right."""
        self.cancelled = False
        """The call has ended: its requests are to end, too."""

    @property
    def lost(self) -> bool:
        """It will not be released any more."""
        return not self.released and (self.cancelled or self._owner() is None)
