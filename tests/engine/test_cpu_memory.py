"""Freed memory stays with the process: the next step's activations are made of pages that are there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CHILD = """
import sys, psutil, torch
from layertap.engine.cpu_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def step():
    blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(8)]
for _ in range(3):
    step()
before = psutil.Process().memory_info().data  # not rss: a machine short of memory takes pages away
step()
blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(8)]
during = psutil.Process().memory_info().data
print(kept, before, during)
"""


def child(what: str, **environment: str) -> tuple[bool, float]:
    """Whether freed memory was kept, and how much a step added to the process's memory, in MiB."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    command = [sys.executable, "-c", _CHILD, what]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    kept, before, during = output.split()
    return kept == "True", (int(during) - int(before)) / (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_step_needs_no_new_pages_for_what_the_last_one_freed() -> None:
    for _ in range(3):  # left to itself the library gives back nothing, or all 160 MiB, as the addresses fall
        kept, added = child("keep")
        assert kept
        assert added < 5


@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
        {"GLIBC_TUNABLES": "glibc.pthread.rseq=1:glibc.malloc.mmap_threshold=65536"},
    ],
    ids=str,
)
def test_what_the_user_has_set_stays(setting: dict[str, str]) -> None:
    assert not child("keep", **setting)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_other_settings_of_the_library_do_not_matter() -> None:
    assert child("keep", GLIBC_TUNABLES="glibc.pthread.rseq=1")[0]
