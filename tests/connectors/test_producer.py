import errno
import os
import subprocess
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.helpers import SERVED, GatedSink, drain, make_job, make_producer, naive_rows, paged_cache
from layertap.connectors.gather import CpuGather
from layertap.errors import InvalidInputError
from layertap.record import read_record
from layertap.sinks.file import FileSink
from layertap.sinks.memory import MemorySink

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def deliver(cache, job, **settings):
    sink = MemorySink()
    producer = make_producer(cache, sink, **settings)
    producer.submit(job)
    copied, completed = drain(producer, 1)
    producer.close()
    assert copied == [job.request_id]
    done = completed[job.request_id]
    return done.error if done.error else sink.take(done.handle)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(list(NAMES.values())),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([1, 64, 200, 4096]),
)
def test_rows_equal_naive_indexing_bit_for_bit(data, dtype, head_first, block_size, chunk_bytes):
    cache = paged_cache(block_size=block_size, dtype=dtype, head_first=head_first, num_blocks=16)
    num_tokens = data.draw(st.integers(1, 7 * block_size))
    num_blocks = -(-num_tokens // block_size)
    scattered = st.lists(st.integers(0, 15), min_size=num_blocks, max_size=num_blocks, unique=True)
    run = st.integers(0, 16 - num_blocks).map(lambda a: list(range(a, a + num_blocks)))
    block_ids = data.draw(scattered | run)
    layers = data.draw(st.lists(st.sampled_from([0, 3, 5]), min_size=1, max_size=3))
    tokens = data.draw(
        st.sampled_from(["all", "last"])
        | st.lists(st.integers(-num_tokens, num_tokens - 1), min_size=1, max_size=9)
        | st.integers(0, num_tokens - 1).map(lambda a: slice(a, None))
    )
    job = make_job("r", num_tokens, block_ids, {"layers": layers, "tokens": tokens})
    record = deliver(cache, job, chunk_bytes=chunk_bytes, ring_bytes=chunk_bytes)
    positions = list(job.selection.positions(num_tokens))
    expected = naive_rows(cache, block_ids, positions, [[0, 3, 5].index(i) for i in layers])
    assert record.hidden_states.dtype == dtype
    assert torch.equal(record.hidden_states, expected)
    assert record.token_ids.tolist() == [100 + p for p in positions]
    assert record.layer_ids == tuple(layers)
    assert list(record.positions or range(num_tokens)) == positions


@pytest.mark.parametrize("source", list(NAMES.values()))
@pytest.mark.parametrize("target", list(NAMES))
def test_casts_equal_torchs(source, target):
    cache = paged_cache(dtype=source, hidden_size=300, num_blocks=64)
    record = deliver(cache, make_job("r", 200, range(50), {"dtype": target}), chunk_bytes=150_000)
    assert torch.equal(record.hidden_states, cache.view(-1, 3, 300)[:200].to(NAMES[target]))


@pytest.mark.parametrize("source", list(NAMES.values()))
def test_float8_scales_are_a_tokens_largest_magnitude_over_448(source):
    cache = paged_cache(dtype=source, hidden_size=300)
    cache[0, 1] = 0
    cache[0, 2] = 1e-7
    if source != torch.float16:
        cache[0, 3] *= 1e30
    record = deliver(cache, make_job("r", 40, range(10), {"dtype": "float8_e4m3fn"}), chunk_bytes=20_000)
    rows = cache.view(-1, 3, 300)[:40].float()
    largest = rows.abs().amax((1, 2), keepdim=True)
    assert record.hidden_states.dtype == torch.float8_e4m3fn
    assert record.scales.shape == (40, 1, 1)
    nonzero = largest.flatten() > 0
    torch.testing.assert_close(record.scales[nonzero], (largest / 448)[nonzero], rtol=1e-6, atol=0)
    error = (record.dequantized - rows).abs()
    assert torch.isfinite(record.dequantized).all()
    assert (error <= rows.abs() / 16 + largest / 448 / 512 * 1.01).all()
    assert (record.dequantized[1] == 0).all()


def test_a_large_bfloat16_value_keeps_its_bits_and_is_an_error_as_float16():
    cache = paged_cache()
    cache[2, 1, 1, 3] = 1e5
    record = deliver(cache, make_job("r", 40, range(10)))
    assert torch.equal(record.hidden_states.view(torch.int16), cache.view(-1, 3, 8)[:40].view(torch.int16))
    error = deliver(cache, make_job("r", 40, range(10), {"dtype": "float16"}))
    assert error.kind == "dtype_overflow"
    assert "layer 3 at position 9" in error.reason
    fine = deliver(cache, make_job("r", 40, range(10), {"dtype": "float16", "layers": [0, 5]}))
    assert torch.isfinite(fine.hidden_states).all()


def test_a_float32_value_beyond_bfloat16_is_an_error():
    cache = paged_cache(dtype=torch.float32)
    cache[0, 2, 0, 0] = -3.4e38
    assert deliver(cache, make_job("r", 8, range(2), {"dtype": "bfloat16"})).kind == "dtype_overflow"
    assert deliver(cache, make_job("r", 8, range(2))).hidden_states[2, 0, 0] == cache[0, 2, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", list(NAMES.values()))
@pytest.mark.parametrize("wanted", ["auto", "float8_e4m3fn"])
def test_states_that_are_not_finite_are_refused_and_the_next_request_is_served(value, dtype, wanted):
    cache = paged_cache(dtype=dtype)
    cache[7, 2, 2, 5] = value
    cache[8, 0, 0, 0] = value
    sink = MemorySink()
    producer = make_producer(cache, sink, chunk_bytes=300, ring_bytes=300, num_writers=1)
    producer.submit(make_job("bad", 40, range(10), {"dtype": wanted}))
    producer.submit(make_job("good", 28, range(7), {"dtype": wanted}))
    copied, completed = drain(producer, 2)
    producer.close()
    assert sorted(copied) == ["bad", "good"]
    assert completed["bad"].error.kind == "not_finite"
    assert "layer 5 at position 30" in completed["bad"].error.reason
    assert completed["good"].handle in sink
    assert "memory://bad" not in sink
    assert producer.ring.in_use == 0


def test_a_layer_that_is_zero_for_every_kept_token_is_refused():
    cache = paged_cache()
    cache[:9, :, 1] = 0
    for chunk_bytes in (96, 1 << 16):
        error = deliver(cache, make_job("r", 36, range(9)), chunk_bytes=chunk_bytes)
        assert error.kind == "all_zero"
        assert "layer 3" in error.reason
        record = deliver(cache, make_job("r", 40, range(10)), chunk_bytes=chunk_bytes)
        assert record.hidden_states.shape == (40, 3, 8)
        assert (
            deliver(cache, make_job("r", 36, range(9), {"layers": [0, 5]}), chunk_bytes=chunk_bytes).scales
            is None
        )


def test_negative_zero_is_zero_and_negative_numbers_count():
    cache = paged_cache()
    cache[:, :, 1] = -0.0
    assert deliver(cache, make_job("r", 8, range(2))).kind == "all_zero"
    cache[1, 1, 1, 0] = -1e-3
    assert deliver(cache, make_job("r", 8, range(2))).hidden_states[5, 1, 0] < 0


def test_output_tokens_are_kept_only_when_asked_for():
    cache = paged_cache()
    job = make_job("r", 12, range(3), None, num_prompt_tokens=9)
    assert len(deliver(cache, job)) == 9
    job = make_job("r", 12, range(3), {"include_output_tokens": True}, num_prompt_tokens=9)
    record = deliver(cache, job)
    assert len(record) == 12
    assert record.positions is None
    assert record.metadata["num_prompt_tokens"] == "9"


def test_a_job_far_larger_than_the_ring_passes_through_it(tmp_path):
    cache = torch.randint(1, 1000, (1024, 16, 3, 1024), dtype=torch.int16).view(torch.bfloat16)
    sink = FileSink(tmp_path)
    producer = make_producer(cache, sink, chunk_bytes=1 << 20, ring_bytes=2 << 20)
    for i in range(2):
        producer.submit(make_job(f"r{i}", 1024 * 16 - i, range(1024)))
    _, completed = drain(producer, 2)
    producer.close()
    assert producer.stats()["bytes_written"] > 190 << 20
    assert producer.ring.high_water <= 2
    for i in range(2):
        record = read_record(completed[f"r{i}"].handle)
        assert torch.equal(
            record.hidden_states.view(torch.int16), cache.view(-1, 3, 1024)[: 16384 - i].view(torch.int16)
        )
    sink.close()


def test_memory_is_bounded_by_the_ring_whatever_the_backlog():
    cache = paged_cache()
    sink = GatedSink(MemorySink())
    producer = make_producer(cache, sink, chunk_bytes=256, ring_bytes=512, num_writers=4)
    for i in range(200):
        producer.submit(make_job(f"r{i}", 40, range(10)))
    assert sink.writing.acquire(timeout=5)
    assert sink.writing.acquire(timeout=5)
    time.sleep(0.05)
    assert producer.ring.in_use == 2
    assert producer.ring.allocated_bytes == 2 * 256
    assert producer.poll() == [], "blocks stay allocated while the sink is slow"
    sink.gate.set()
    _, completed = drain(producer, 200)
    producer.close()
    assert all(done.error is None for done in completed.values())
    assert producer.ring.high_water == 2
    assert producer.ring.allocated_bytes == 0
    stats = producer.stats()
    assert stats["staging_wait_seconds"] > 0
    assert stats["write_seconds"] > 0.05, "two writers stood at the sink's gate"
    assert stats["gather_seconds"] > 0


def test_cancel_at_each_stage_publishes_nothing_and_returns_the_blocks(tmp_path):
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    cache = paged_cache()
    files = FileSink(tmp_path)
    sink = GatedSink(files)
    producer = make_producer(cache, sink, chunk_bytes=96, ring_bytes=96, num_writers=2)
    producer.submit(make_job("writing", 40, range(10)))
    assert sink.writing.acquire(timeout=5)
    producer.submit(make_job("starved", 40, range(10)))  # its writer waits for the one staging buffer
    for _ in range(100):
        if producer.stats()["requests_writing"] == 2:
            break
        time.sleep(0.01)
    producer.submit(make_job("queued", 40, range(10)))
    producer.submit(make_job("kept", 40, range(10)))
    assert producer.cancel("queued")
    copied, completed = drain(producer, 1, timeout=2)
    assert copied == ["queued"]
    assert completed["queued"].error.kind == "aborted"
    assert producer.cancel("starved")
    assert drain(producer, 1, timeout=2)[0] == ["starved"]
    assert producer.cancel("writing")
    sink.gate.set()
    copied, completed = drain(producer, 2)
    assert sorted(copied) == ["kept", "writing"]
    assert completed["writing"].error.kind == "aborted"
    assert completed["kept"].error is None
    assert not producer.cancel("kept")
    assert not producer.cancel("unknown")
    producer.close()
    files.close()
    assert os.listdir(tmp_path) == ["kept.safetensors"]
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "storage_full"),
        (OSError(errno.EDQUOT, "Quota exceeded"), "storage_full"),
        (PermissionError(errno.EACCES, "Permission denied"), "storage"),
        (RuntimeError("the sink is gone"), "engine"),
    ],
)
def test_whatever_a_sink_raises_fails_its_request_and_the_thread_lives_on(error, kind):
    sink = GatedSink(MemorySink())
    sink.gate.set()
    sink.error = error
    producer = make_producer(paged_cache(), sink, num_writers=1)
    producer.submit(make_job("r", 8, range(2)))
    copied, completed = drain(producer, 1)
    assert copied == ["r"]
    assert completed["r"].error.kind == kind
    assert completed["r"].error.__cause__ is error
    sink.error = None
    producer.submit(make_job("r", 8, range(2)))
    assert drain(producer, 1)[1]["r"].error is None
    producer.close()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_fails_the_request_and_one_with_room_works_again(small_disk, foreseen):
    cache = paged_cache(num_blocks=256, hidden_size=1024)
    sink = FileSink(small_disk)
    producer = make_producer(cache, sink, chunk_bytes=1 << 18)
    (small_disk / "ballast").write_bytes(bytes(3 << 20 if foreseen else (4 << 20) - 400_000))
    tokens = 400 if foreseen else 150  # 2.4 MB are refused at the start, 0.9 MB run into the wall
    producer.submit(make_job("r", tokens, range(256)))
    copied, completed = drain(producer, 1)
    assert copied == ["r"]
    assert completed["r"].error.kind == "storage_full"
    assert "make room" in completed["r"].error.reason
    assert [n for n in os.listdir(small_disk) if not n.endswith(".lock")] == ["ballast"]
    (small_disk / "ballast").unlink()
    producer.submit(make_job("r", tokens, range(256)))
    _, completed = drain(producer, 1)
    assert len(read_record(completed["r"].handle)) == tokens
    producer.close()
    sink.close()


def test_many_jobs_of_one_row_from_several_writers(tmp_path):
    cache = paged_cache(num_blocks=128)
    sink = FileSink(tmp_path)
    producer = make_producer(cache, sink, num_writers=4)
    for i in range(500):
        producer.submit(make_job(f"r{i}", 4, [i % 128], {"tokens": "last"}))
    _, completed = drain(producer, 500)
    producer.close()
    sink.close()
    assert len(os.listdir(tmp_path)) == 500
    for i in range(0, 500, 17):
        record = read_record(completed[f"r{i}"].handle)
        assert torch.equal(record.hidden_states[0], cache[i % 128, 3])
        assert record.positions == (3,)


def test_an_id_under_way_is_refused_a_second_time():
    sink = GatedSink(MemorySink())
    producer = make_producer(paged_cache(), sink)
    producer.submit(make_job("r", 8, range(2)))
    with pytest.raises(InvalidInputError, match="request_id"):
        producer.submit(make_job("r", 8, range(2)))
    sink.gate.set()
    producer.close()


def test_close_delivers_or_aborts_what_is_queued():
    for drained in (True, False):
        sink = GatedSink(MemorySink())
        producer = make_producer(paged_cache(), sink, num_writers=1)
        for i in range(5):
            producer.submit(make_job(f"r{i}", 8, range(2)))
        assert sink.writing.acquire(timeout=5)
        threading.Timer(0.05, sink.gate.set).start()
        producer.close(drain=drained)
        _, completed = drain(producer, 5)
        assert all((done.error is None) == drained for done in completed.values())
        assert producer.idle
        with pytest.raises(RuntimeError, match="closed"):
            producer.submit(make_job("late", 8, range(2)))


def test_layers_asked_for_more_often_than_a_buffer_holds_are_refused():
    producer = make_producer(paged_cache(), chunk_bytes=96)
    producer.check((0, 1, 2))
    with pytest.raises(InvalidInputError, match="at most 3 layers"):
        producer.check((0,) * 4)
    producer.close()


def test_wait_returns_when_there_is_news():
    producer = make_producer(paged_cache())
    assert not producer.wait(0.01)
    producer.submit(make_job("r", 8, range(2)))
    assert producer.wait(5)
    drain(producer, 1)
    producer.close()
    assert SERVED.columns == (0, 3, 5)


def submitted_together(cache, jobs, sink=None, **settings):
    """All jobs in one call; what was gathered at once, what was copied, and what became of each."""
    starts: list[int] = []
    start = CpuGather.start

    def counting(self, slots, *rest):
        starts.append(len(slots))
        return start(self, slots, *rest)

    producer = make_producer(cache, sink, num_writers=1, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuGather, "start", counting)
        producer.submit(*jobs)
        copied, completed = drain(producer, len(jobs))
    producer.close()
    assert producer.ring.in_use == 0
    assert sorted(copied) == sorted(job.request_id for job in jobs)
    return starts, completed, producer.sink


def test_small_jobs_of_one_step_are_gathered_at_once():
    cache = paged_cache()
    jobs = [make_job(f"r{i}", 8 + i, [i, 63 - i, 30 + i]) for i in range(5)]
    starts, completed, sink = submitted_together(cache, jobs)
    assert starts == [sum(range(8, 13))]
    for i, job in enumerate(jobs):
        record = sink.take(completed[f"r{i}"].handle)
        expected = naive_rows(cache, job.block_ids, range(8 + i), range(3))
        assert torch.equal(record.hidden_states, expected)
        assert record.token_ids.tolist() == list(job.token_ids)


def test_any_number_of_tiny_jobs_is_gathered_at_once_where_nothing_is_written(tmp_path):
    cache = paged_cache()
    jobs = [make_job(f"r{i}", 3, [i], {"tokens": "last"}) for i in range(60)]
    starts, completed, sink = submitted_together(cache, jobs)
    assert starts == [60]
    records = [sink.take(completed[job.request_id].handle) for job in jobs]
    for i, record in enumerate(records):
        assert torch.equal(record.hidden_states, naive_rows(cache, [i], [2], range(3)))
        assert record.positions == (2,)
    storages = {record.hidden_states.untyped_storage().data_ptr() for record in records}
    assert len(storages) == len(records), "one that stays would keep the others' memory"
    starts, _, _ = submitted_together(cache, jobs, FileSink(tmp_path))
    assert starts == [32, 28]


def test_memory_that_is_short_fails_the_jobs_and_the_thread_lives_on(monkeypatch):
    def short(*_):
        raise RuntimeError("can't allocate memory")

    producer = make_producer(paged_cache(), num_writers=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "split_with_sizes_copy", short)
        producer.submit(*(make_job(f"r{i}", 3, [i]) for i in range(3)))
        _, completed = drain(producer, 3)
    assert all("can't allocate memory" in done.error.reason for done in completed.values())
    producer.submit(make_job("next", 3, [1]), make_job("last", 3, [2]))
    _, completed = drain(producer, 2)
    assert all(done.error is None for done in completed.values())
    assert producer.ring.in_use == 0
    producer.close()


def test_what_does_not_fit_or_is_kept_otherwise_is_gathered_by_itself():
    cache = paged_cache()
    row = 3 * 8 * 2
    jobs = [
        make_job("a", 10, range(3)),
        make_job("b", 10, range(3, 6)),
        make_job("does not fit", 10, range(6, 9)),
        make_job("larger than a buffer", 30, range(10, 18)),
        make_job("one layer", 10, range(20, 23), {"layers": [3]}),
        make_job("another dtype", 10, range(23, 26), {"dtype": "float32"}),
        make_job("scaled", 6, range(26, 28), {"dtype": "float8_e4m3fn"}),
        make_job("scaled, too", 7, range(30, 32), {"dtype": "float8_e4m3fn"}),
    ]
    starts, completed, sink = submitted_together(cache, jobs, chunk_bytes=25 * row)
    assert starts == [20, 10, 25, 5, 10, 10, 13]
    for job in jobs:
        record = sink.take(completed[job.request_id].handle)
        alone = deliver(cache, job)
        assert torch.equal(record.dequantized, alone.dequantized)
        assert record.metadata == alone.metadata


def test_a_job_that_fails_leaves_those_gathered_with_it_alone():
    cache = paged_cache()
    cache[5, 1, 1, 2] = float("nan")
    cache[6:8, :, 2] = 0
    jobs = [make_job(f"r{i}", 8, [2 * i, 2 * i + 1]) for i in range(6)]
    jobs.append(make_job("nothing kept", 8, [20, 21], {"tokens": slice(0, 8)}, num_prompt_tokens=8))
    starts, completed, sink = submitted_together(cache, jobs)
    assert starts == [56]
    assert {name: done.error.kind for name, done in completed.items() if done.error} == {
        "r2": "not_finite",
        "r3": "all_zero",
    }
    assert "position 5" in completed["r2"].error.reason
    for i in (0, 1, 4, 5):
        assert torch.equal(
            sink.take(f"memory://r{i}").hidden_states,
            naive_rows(cache, [2 * i, 2 * i + 1], range(8), range(3)),
        )


def test_a_sink_that_refuses_one_of_several_jobs_fails_it_alone():
    class Refusing(MemorySink):
        def open(self, spec):
            if spec.request_id == "r1":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(spec)

    jobs = [make_job(f"r{i}", 8, [i, i + 1]) for i in range(3)]
    starts, completed, _ = submitted_together(paged_cache(), jobs, Refusing())
    assert starts == [24]
    assert completed["r1"].error.kind == "storage_full"
    assert completed["r0"].error is None
    assert completed["r2"].error is None


def test_a_writer_thread_has_one_record_open_at_a_time(tmp_path):
    """However many are gathered together: open files are scarce."""
    most = 0

    class Counting(FileSink):
        def open(self, spec):
            nonlocal most
            writer = super().open(spec)
            most = max(most, len(list(tmp_path.glob(".layertap-*.tmp"))))
            return writer

    jobs = [make_job(f"r{i}", 8, [i, i + 1]) for i in range(20)]
    jobs.append(make_job("nan", 8, [40, 41]))
    cache = paged_cache()
    cache[40] = float("nan")
    starts, completed, _ = submitted_together(cache, jobs, Counting(tmp_path))
    assert starts == [21 * 8]
    assert [name for name, done in completed.items() if done.error] == ["nan"]
    assert most == 1


def test_a_gather_that_fails_fails_its_jobs_and_the_thread_lives_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    producer = make_producer(paged_cache(), num_writers=1)
    with monkeypatch.context() as patch:
        patch.setattr(CpuGather, "start", broken)
        producer.submit(make_job("a", 8, range(2)), make_job("b", 8, range(2)))
        copied, completed = drain(producer, 2)
    assert sorted(copied) == ["a", "b"]
    assert all("out of memory" in done.error.reason for done in completed.values())
    producer.submit(make_job("a", 8, range(2)))
    assert drain(producer, 1)[1]["a"].error is None
    producer.close()
    assert producer.ring.in_use == 0


def test_one_of_several_jobs_is_cancelled_between_two_writes():
    sink = GatedSink(MemorySink())
    producer = make_producer(paged_cache(), sink, num_writers=1)
    producer.submit(*(make_job(f"r{i}", 8, range(2)) for i in range(3)))
    assert sink.writing.acquire(timeout=5)
    assert producer.cancel("r1")
    sink.gate.set()
    copied, completed = drain(producer, 3)
    producer.close()
    assert sorted(copied) == ["r0", "r1", "r2"]
    assert completed["r1"].error.kind == "aborted"
    assert completed["r0"].error is None
    assert completed["r2"].error is None


def test_a_gather_for_several_jobs_waits_for_the_states_of_each(monkeypatch):
    """They may come from several streams, so that no event stands for another."""
    waited: list[list[str]] = []
    start = CpuGather.start

    def noting(self, slots, columns, dtype, buffer, ready):
        waited.append(list(ready))
        return start(self, slots, columns, dtype, buffer, ready)

    monkeypatch.setattr(CpuGather, "start", noting)
    sink = GatedSink(MemorySink())
    producer = make_producer(paged_cache(), sink, num_writers=1)
    producer.submit(make_job("first", 8, range(2)))
    assert sink.writing.acquire(timeout=5)
    producer.submit(make_job("a", 8, range(2)), make_job("b", 8, range(2)))
    producer.submit(make_job("c", 8, range(2)))
    for name, event in (("a", "one"), ("b", "one"), ("c", "another")):
        producer._tasks[name].ready = (event,)
    sink.gate.set()
    drain(producer, 4)
    producer.close()
    assert waited == [[], ["one", "another"]]


def test_an_id_twice_in_one_call_takes_nothing():
    producer = make_producer(paged_cache())
    with pytest.raises(InvalidInputError, match="request_id"):
        producer.submit(make_job("r", 8, range(2)), make_job("r", 8, range(2)))
    assert producer.idle
    producer.close()


def test_small_jobs_are_shared_among_the_writers(tmp_path):
    sink = GatedSink(MemorySink())
    producer = make_producer(paged_cache(), sink, num_writers=4)
    producer.submit(*(make_job(f"r{i}", 8, range(2)) for i in range(16)))
    for _ in range(4):
        assert sink.writing.acquire(timeout=5), "each of four writers writes"
    sink.gate.set()
    _, completed = drain(producer, 16)
    producer.close()
    assert all(done.error is None for done in completed.values())


def test_a_small_jobs_record_is_told_of_while_the_next_one_is_still_being_written():
    gate = threading.Event()
    sink = MemorySink()
    open_writer = sink.open

    def open_late(spec):
        if spec.request_id == "c":
            assert gate.wait(30)
        return open_writer(spec)

    sink.open = open_late
    producer = make_producer(paged_cache(), sink, num_writers=1)
    producer.submit(*(make_job(name, 2, [i]) for i, name in enumerate("abc")))
    told = set()
    deadline = time.monotonic() + 5
    while told != {"a", "b"} and time.monotonic() < deadline:
        told |= {news.request_id for news in producer.poll(0.05) if news.kind == "completed"}
    gate.set()
    assert told == {"a", "b"}
    producer.close()
    assert [news.request_id for news in producer.poll()] == ["c"]
