"""The producer over a cache on a GPU equals the producer over the same cache on the CPU."""

import dataclasses

import pytest
import torch

from connectors.helpers import drain, make_job, make_producer, paged_cache
from layertap.sinks.memory import MemorySink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def deliver(cache, jobs, **settings):
    sink = MemorySink()
    producer = make_producer(cache, sink, **settings)
    producer.submit(*jobs)
    _, completed = drain(producer, len(jobs), timeout=60)
    producer.close()
    assert producer.ring.in_use == 0
    return {name: done.error or sink.take(done.handle) for name, done in completed.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16", "float8_e4m3fn"])
def test_a_gpu_cache_gives_what_a_cpu_cache_gives(dtype, head_first, wanted):
    cache = paged_cache(dtype=dtype, head_first=head_first, hidden_size=256)
    block_ids = torch.randperm(64)[:30].tolist()
    jobs = [
        make_job("all", 117, block_ids, {"dtype": wanted}),
        make_job("some", 117, block_ids, {"dtype": wanted, "layers": [5, 0, 5], "tokens": [9, 3, -1]}),
        make_job("last", 117, block_ids, {"dtype": wanted, "tokens": "last"}),
    ]
    on_cpu = deliver(cache, jobs)
    on_gpu = deliver(cache.cuda(), jobs, chunk_bytes=20_000, ring_bytes=60_000)
    for name, record in on_cpu.items():
        assert not isinstance(on_gpu[name], Exception), (
            f"{on_gpu[name]!r}, because {on_gpu[name].__cause__!r}"
        )
        assert torch.equal(on_gpu[name].token_ids, record.token_ids)
        if record.scales is None:
            assert torch.equal(on_gpu[name].hidden_states, record.hidden_states)
        else:
            torch.testing.assert_close(on_gpu[name].scales, record.scales, rtol=1e-6, atol=0)
            torch.testing.assert_close(on_gpu[name].dequantized, record.dequantized, rtol=0.13, atol=1e-3)


def test_rows_written_by_work_that_is_still_queued_are_waited_for():
    cache = paged_cache(dtype=torch.float32, hidden_size=256).cuda()
    expected = torch.full((40, 3, 256), 5.0)
    weights = torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        weights = (weights @ weights).clamp_(-1, 1)
    cache[:10] = 5.0
    record = deliver(cache, [make_job("r", 40, range(10))])["r"]
    assert torch.equal(record.hidden_states, expected)


def test_a_job_with_an_event_does_not_wait_for_what_was_queued_after_it():
    cache = paged_cache(dtype=torch.float32, hidden_size=256).cuda()
    sink = MemorySink()
    producer = make_producer(cache, sink)
    producer.submit(make_job("warm-up", 40, range(10)))  # compiles, and takes page-locked memory
    drain(producer, 1, timeout=60)
    weights = torch.randn(8192, 8192, device="cuda")
    torch.mm(weights, weights)
    ready, busy_until = torch.cuda.Event(), torch.cuda.Event()
    ready.record()
    for _ in range(200):  # some seconds
        torch.mm(weights, weights)
    busy_until.record()
    producer.submit(dataclasses.replace(make_job("r", 40, range(10)), ready=ready))
    _, completed = drain(producer, 1, timeout=60)
    assert not busy_until.query()
    record = sink.take(completed["r"].handle)
    assert torch.equal(record.hidden_states, cache[:10].cpu().flatten(0, 1))
    producer.close()


def test_faults_are_found_on_the_gpu_as_on_the_cpu():
    cache = paged_cache()
    cache[7, 2, 2, 5] = float("nan")
    cache[8, 1, 1, 1] = 1e5
    cache[20:22, :, 1] = 0
    jobs = [make_job("nan", 40, range(10)), make_job("zero", 8, [20, 21]),
            make_job("large", 4, [8], {"dtype": "float16"}), make_job("good", 8, [0, 20])]  # fmt: skip
    outcome = deliver(cache.cuda(), jobs, chunk_bytes=300, ring_bytes=900)
    assert outcome["nan"].kind == "not_finite"
    assert "layer 5 at position 30" in outcome["nan"].reason
    assert outcome["zero"].kind == "all_zero"
    assert outcome["large"].kind == "dtype_overflow"
    assert torch.equal(outcome["good"].hidden_states, torch.cat([cache[0], cache[20]]))


@pytest.mark.parametrize("wanted", ["auto", "float8_e4m3fn"])
def test_small_jobs_that_are_gathered_at_once(wanted):
    cache = paged_cache(hidden_size=256)
    jobs = [
        make_job(f"r{i}", 5 + i % 4, [3 * i % 64, (3 * i + 1) % 64], {"dtype": wanted}) for i in range(40)
    ]
    on_cpu, on_gpu = deliver(cache, jobs), deliver(cache.cuda(), jobs)
    for name, record in on_cpu.items():
        assert not isinstance(on_gpu[name], Exception), on_gpu[name]
        torch.testing.assert_close(on_gpu[name].dequantized, record.dequantized, rtol=0.13, atol=1e-3)
