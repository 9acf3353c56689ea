"""Memory of records that nobody holds any more is used again, and never while somebody does."""

from __future__ import annotations

import mmap
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.sinks import record_memory
from layertap.sinks.record_memory import RecordMemory

MB = 1 << 20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others get plain tensors")


def make(memory: RecordMemory, megabytes: int) -> torch.Tensor:
    return memory.empty((megabytes * MB // 8, 2, 2), torch.bfloat16)


def test_a_block_comes_back_when_the_last_view_is_gone() -> None:
    memory = RecordMemory(100 * MB)
    record = make(memory, 12)
    assert record.shape == (12 * MB // 8, 2, 2)
    assert record.dtype == torch.bfloat16
    assert record.is_contiguous()
    where = record.data_ptr()
    record.fill_(3)
    view = record[5:7, 1]
    del record
    other = make(memory, 12)
    other.fill_(4)
    assert other.data_ptr() != where
    assert view.tolist() == [[3, 3], [3, 3]], "somebody still looks at it"
    del view
    assert memory.kept_bytes == 12 * MB
    assert make(memory, 11).data_ptr() == where, "a little smaller fits"


def test_a_much_smaller_record_does_not_hold_a_large_block() -> None:
    memory = RecordMemory(100 * MB)
    del_me = make(memory, 40)
    where = del_me.data_ptr()
    del del_me
    small = make(memory, 10)
    assert not where <= small.data_ptr() < where + 40 * MB
    assert memory.kept_bytes == 40 * MB


def test_what_is_more_than_may_be_kept_is_at_hand_until_the_system_takes_it() -> None:
    memory = RecordMemory(25 * MB)
    records = [make(memory, 10) for _ in range(5)]
    where = {record.data_ptr() for record in records}
    del records
    assert (memory.kept_bytes, memory.lent_bytes) == (50 * MB, 30 * MB)
    held = [make(memory, 10) for _ in range(5)]
    assert {record.data_ptr() for record in held} == where
    assert (memory.kept_bytes, memory.lent_bytes) == (0, 0)
    for i, record in enumerate(held):
        record.fill_(i)
    assert [record.float().mean().item() for record in held] == [0, 1, 2, 3, 4]
    memory.close()
    del held
    assert memory.kept_bytes == 0, "closed: nothing comes back"


def test_a_system_that_knows_no_lending_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_FREE", 12345)
    memory = RecordMemory(25 * MB)
    records = [make(memory, 10) for _ in range(5)]
    del records
    assert (memory.kept_bytes, memory.lent_bytes) == (20 * MB, 0)


def lazily_freed() -> int:
    """Kilobytes of this process that the system may take."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"LazyFree: +(\d+) kB", text)
    assert found
    return int(found[1])


def test_the_system_is_told() -> None:
    memory = RecordMemory(0)
    record = make(memory, 64)
    record.fill_(1)
    before = lazily_freed()
    del record
    assert memory.lent_bytes == 64 * MB
    assert lazily_freed() >= before + 60 * 1024
    make(memory, 64).fill_(2)


def test_blocks_that_no_longer_fit_make_room_for_those_that_do() -> None:
    memory = RecordMemory(100 * MB)
    large = [make(memory, 30) for _ in range(3)]
    del large
    small = make(memory, 12)
    where = small.data_ptr()
    del small
    assert make(memory, 12).data_ptr() == where
    assert memory.kept_bytes == 72 * MB


def test_what_lies_unused_is_given_back_where_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RecordMemory(100 * MB)
    unused = make(memory, 30)
    del unused

    def none(size: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(record_memory, "_new", none)
    record = make(memory, 60)
    record.fill_(1)
    assert memory.kept_bytes == 0


def test_small_tensors_are_plain_ones() -> None:
    memory = RecordMemory(100 * MB)
    tensor = memory.empty((3, 0, 4), torch.float32)
    assert tensor.shape == (3, 0, 4)
    make(memory, 1)
    assert memory.kept_bytes == 0


def test_threads_never_share_a_block() -> None:
    memory = RecordMemory(64 * MB)
    wrong = []

    def work(mark: int) -> None:
        for i in range(25):
            tensor = memory.empty((9 * MB + i,), torch.uint8)
            tensor[:: 64 * 1024] = mark
            if not bool((tensor[:: 64 * 1024] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < memory.kept_bytes - memory.lent_bytes <= 64 * MB


def flags_of_mapping(address: int) -> list[str]:
    """What the kernel notes of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_large_records_are_asked_to_lie_in_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no large pages")
    tensor = RecordMemory(0).empty((64 * MB,), torch.uint8)
    flags = flags_of_mapping(tensor.data_ptr() + 32 * MB)
    if not flags:
        pytest.skip("this kernel does not tell")
    assert "hg" in flags
    tensor.fill_(7)
    assert int(tensor[-1]) == 7


def test_records_that_take_turns_use_the_same_blocks_whatever_may_lie_unused() -> None:
    memory = RecordMemory(20 * MB)
    record, others = make(memory, 10), [make(memory, 10) for _ in range(5)]
    where = {other.data_ptr() for other in others}
    del others
    assert memory.kept_bytes == 50 * MB, "with the one in use as much as was in use at once"
    assert memory.lent_bytes == 30 * MB
    again = [make(memory, 10) for _ in range(5)]
    assert {other.data_ptr() for other in again} == where
    del again
    large = make(memory, 30)
    assert memory.kept_bytes == 20 * MB, "of another size: no more in all than before"
    del record, large
    assert memory.kept_bytes == 60 * MB
    assert memory.lent_bytes >= 40 * MB


def test_what_was_in_use_long_ago_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RecordMemory(20 * MB)
    many = [make(memory, 10) for _ in range(9)]
    one = make(memory, 10)
    del many
    assert (memory.kept_bytes, memory.lent_bytes) == (90 * MB, 70 * MB)
    monkeypatch.setattr(record_memory, "_LATELY", 0.0)
    other = make(memory, 10)
    assert memory.kept_bytes <= 20 * MB
    del one, other
