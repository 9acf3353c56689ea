"""The prompts of one call, submitted so that nothing of any is seen unless all of them are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layertap.engine.collector import OutputCollector
from layertap.engine.hold import Hold, Owner
from layertap.engine.standing_heap import collections_put_off

LAST = 32
"""Prompts at the end of a long call that are computed in another order."""


def submit_checked(
    collectors: Iterable[OutputCollector],
    count: int,
    submit: Callable[[OutputCollector], None],
    running: dict[int, OutputCollector],
    at_once: float,
) -> None:
    """Submit prompts that are right, all of them. Where one is wrong, or the call is interrupted, the caller
    is to abort what runs.

    A GPU need not wait for the last one's check: it computes meanwhile, and what it computes is held. Of the
    last prompts the longest go first: when it is done, the records that are left are short ones.

    Args:
        collectors: of the prompts, in order; each is checked when it is asked for.
        count: how many they are.
        running: the submitted ones by number; filled.
        at_once: from so many tokens on, prompts are computed while later ones are checked.
    """
    checked: dict[int, OutputCollector] = {}
    owner = Owner()
    hold = Hold(owner)
    tokens = 0
    early = False
    try:
        with collections_put_off():
            for i, collector in enumerate(collectors):
                checked[i] = collector
                tokens += len(collector.prompt.token_ids)
                if tokens >= at_once and i < count - LAST:
                    early = True
                    for held in checked.values():
                        for request in held.requests:
                            request.hold = hold
                    _submit_all(checked, running, submit)
        if early:
            longest = sorted(checked.items(), key=lambda item: -len(item[1].prompt.token_ids))
            checked = dict(longest)
        _submit_all(checked, running, submit)
        hold.released = True
    except BaseException:
        hold.cancelled = True
        raise


def _submit_all(
    checked: dict[int, OutputCollector],
    running: dict[int, OutputCollector],
    submit: Callable[[OutputCollector], None],
) -> None:
    """Move what is checked to what runs."""
    for i, collector in checked.items():
        running[i] = collector
        submit(collector)
    checked.clear()
