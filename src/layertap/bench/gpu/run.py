"""Measures the rows of the ``gpu`` suite: one process after another, each over all rows that it can serve."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.bench.gpu import peak
from layertap.bench.gpu.engine import Engine, Start, Task, max_model_len
from layertap.bench.gpu.results import Results, rates
from layertap.bench.gpu.rows import Row
from layertap.bench.gpu.vllm_ways import ENVIRONMENT
from layertap.bench.peers import environment, missing_modules
from layertap.bench.process import JsonProcess, OutOfTimeError, PeerFailedError
from layertap.engine.memory import format_bytes
from layertap.errors import InvalidInputError

Note = Callable[[str], None]
_WARM_UP_STEPS = 4
_ERROR_CHARACTERS = 6000
_START_SECONDS = {"vllm": 90.0, "layertap": 40.0, "transformers": 25.0}
"""What a start is taken to need until one was seen."""
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How the rows are measured."""

    ways: tuple[str, ...] | None = None
    """None: each row's own."""
    repeat: int = 3
    vllm_python: str = sys.executable
    threads: int | None = None
    time_limit: float | None = None
    """Seconds after which nothing new is started and what runs is stopped."""
    folder: Path | None = None
    """For files and logs; None takes a temporary folder, in memory where the machine has one."""
    any_device: bool = False
    """Measure on a CPU too: for rows that are scaled down."""
    matmul_size: int = peak.SIZE


def run_gpu(rows: Sequence[Row], options: GpuOptions, results: Results, note: Note) -> None:
    """Measure the rows and put what was measured into ``results``, run by run.

    Args:
        note: told what is going on.

    Raises:
        InvalidInputError: there is no GPU.
    """
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=shm) as folder:
        _Suite(rows, options, results, note, options.folder or Path(folder)).run()


class _Suite:
    def __init__(
        self, rows: Sequence[Row], options: GpuOptions, results: Results, note: Note, folder: Path
    ) -> None:
        self.rows = rows
        self.options = options
        self.results = results
        self.note = note
        self.folder = folder
        self.deadline = time.monotonic() + (options.time_limit or float("inf"))
        self.planned: dict[str, list[str]] = {}
        self.device = ""
        self.peak: dict[str, Any] = {}
        self._starts: dict[str, float] = {}
        self._count = 0

    def run(self) -> None:
        try:
            self._measure_peak()
            self._plan()
            # Starts first: their second process goes on with the rows that it can serve.
            for row in sorted(self.rows, key=lambda row: row.measure != "start"):
                for way in self.planned[row.letter]:
                    if self.results.outcome(row, way) is None:
                        self._check_time(way)
                        if row.measure == "start":
                            self._measure_starts(row, way)
                        else:
                            self._measure_rates(Engine.of(row, way))
        except OutOfTimeError as error:
            self.note(f"out of time: {error}")
            for row in self.rows:
                ways = self.planned.get(row.letter, [])
                missing = [way for way in ways if self.results.outcome(row, way) is None]
                if missing:
                    self.note(f"{row.letter}: not measured: {', '.join(missing)}")

    # --- before the first way -----------------------------------------------------------------------------

    def _measure_peak(self) -> None:
        command = [sys.executable, "-m", "layertap.bench.gpu.peak", str(self.options.matmul_size)]
        process = self._process("peak", command, environment(self.options.threads))
        try:
            self.peak = process.answer(self.deadline)
        finally:
            process.close()
        self.device = self.peak["device"]
        if self.device != "cuda" and not self.options.any_device:
            raise InvalidInputError("--suite", "gpu", "cpu, prefix or memory where PyTorch finds no GPU")
        self.note(f"matrix products: {self.peak['matmul_flops_per_second'] / 1e12:,.0f} TFLOP/s")

    def _plan(self) -> None:
        wanted = {
            row.letter: [
                way
                for way in (row.ways if self.options.ways is None else self.options.ways)
                if way in row.ways or way in row.optional
            ]
            for row in self.rows
        }
        missing = ""
        if any(way.startswith("vllm") for ways in wanted.values() for way in ways):
            python = self.options.vllm_python
            missing = " and ".join(missing_modules(python, ("vllm", "layertap")))
            if missing:
                self.note(
                    f"vLLM's ways are left out, and ratios with them: {python} cannot import {missing} "
                    "(--vllm-python names one that can)"
                )
        for row in self.rows:
            ways = wanted[row.letter]
            left_out = {way: f"no {missing}" for way in ways if missing and way.startswith("vllm")}
            self.planned[row.letter] = [way for way in ways if way not in left_out]
            rates_of_peak = {name: value for name, value in self.peak.items() if name != "machine"}
            facts = {"machine": self.peak["machine"], "peak": rates_of_peak}
            self.results.begin(row, facts, left_out)

    # --- ways ---------------------------------------------------------------------------------------------

    def _measure_rates(self, engine: Engine) -> None:
        """Start one engine and run every row over it that wants just this one."""
        way = engine.way
        rows = self._rows_of(engine)
        name = f"{''.join(row.letter for row in rows)} {way}"
        failing = rows
        worker = self._worker(name, engine, rows, {})
        try:
            ready = self._start(worker, name, engine, rows)
            for row in rows:
                failing = [row]  # later ones get another process
                self._run_row(worker, row, engine, ready)
        except PeerFailedError:
            for row in failing:
                self._record_failure(worker, row, engine)
        finally:
            self._end(worker)

    def _rows_of(self, engine: Engine) -> list[Row]:
        """The rows of rates that are still to be measured with this engine."""
        return [
            row
            for row in self.rows
            if row.measure == "rate"
            and engine.way in self.planned[row.letter]
            and Engine.of(row, engine.way) == engine
            and self.results.outcome(row, engine.way) is None
        ]

    def _record_failure(self, worker: JsonProcess, row: Row, engine: Engine) -> None:
        """Keep what the process said: its end in the result, all of it in a file beside."""
        causes = worker.causes()
        self.note(f"{row.letter} {engine.way}: failed\n" + "\n".join(causes or [worker.tail()]))
        if self.results.path is not None:
            log = self.results.path.with_name(f"{self.results.path.stem}-{row.letter}-{engine.way}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(worker.log, log)
            self.note(f"{row.letter} {engine.way}: all that it said is in {log}")
        known = self.results.outcome(row, engine.way) or {"engine": dataclasses.asdict(engine)}
        error = {"causes": causes, "error": worker.tail(_ERROR_CHARACTERS)}
        self.results.record(row, engine.way, {**known, **error})

    def _run_row(self, worker: JsonProcess, row: Row, engine: Engine, ready: Mapping[str, Any]) -> None:
        way = engine.way
        name = f"{row.letter} {way}"
        outcome: dict[str, Any] = {"engine": dataclasses.asdict(engine), **ready}
        needed = 0 if way == "layertap-memory" else row.states_bytes(way)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            outcome["error"] = f"{self.folder} has {format_bytes(free)} free of {format_bytes(needed)} needed"
            self.note(f"{name}: {outcome['error']}")
            self.results.record(row, way, outcome)
            return
        task = Task(row.prompts, 0, row.tokens, row.max_tokens, _WARM_UP_STEPS * row.token_budget)
        self._ask(worker, name, "warm-up", task)
        runs: list[dict[str, Any]] = []
        for turn in range(1, self.options.repeat + 1):
            task = Task(row.prompts, turn, row.tokens, row.max_tokens)
            answer = self._ask(worker, name, f"run {turn} of {self.options.repeat}", task)
            outcome["stats"] = answer.pop("stats")
            runs.append(answer)
            self.results.record(row, way, {**outcome, **self._figures(row, way, runs)})

    def _figures(self, row: Row, way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rates, and how far they are from what the machine can do."""
        num_tokens = row.prompts.num_tokens
        rate = rates(num_tokens, [run["seconds"] for run in runs])
        flops = row.flops(way)
        per_second = flops / num_tokens * rate["median"]
        size = runs[-1]["states_bytes"]
        states = size / num_tokens * rate["median"]
        copy_rate = self.peak["copy_bytes_per_second"]
        return {
            "num_tokens": num_tokens,
            "tokens_per_second": rate,
            "flops_per_run": flops,
            "mfu": per_second / self.peak["matmul_flops_per_second"],
            "states_bytes": size,
            "states_bytes_per_second": states,
            "share_of_copy_rate": states / copy_rate if copy_rate else None,
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
            "runs": runs,
        }

    def _measure_starts(self, row: Row, way: str) -> None:
        """Seconds from the start of a process to its first complete file: with empty compilation caches,
        then with those of the first time. The second process goes on with the other rows of its engine."""
        engine = Engine.of(row, way)
        rows = [row, *self._rows_of(engine)]
        failing = rows
        name = f"{row.letter} {way}"
        cache = self.folder / f"cache-{way}"
        env = {variable: str(cache / variable.lower()) for variable in _CACHES}
        starts: list[dict[str, Any]] = []
        outcome: dict[str, Any] = {"engine": dataclasses.asdict(engine)}
        task = Task(row.prompts, 0, row.tokens, row.max_tokens, _WARM_UP_STEPS * row.token_budget)
        try:
            for caches in ("empty", "filled"):
                self._check_time(way)
                worker = self._worker(name, engine, rows, env)
                try:
                    ready = self._start(worker, name, engine, rows)
                    answer = self._ask(worker, name, "first files", task)
                    seconds = answer["first_at"] - worker.started
                    starts.append({"caches": caches, "seconds": seconds, **ready})
                    self.note(f"{name}: first file after {seconds:.1f} s, caches {caches}")
                    self.results.record(row, way, {**outcome, "starts": starts})
                    for other in rows[1:] if caches == "filled" else ():
                        failing = [other]
                        self._run_row(worker, other, engine, ready)
                except PeerFailedError:
                    for failed in failing:
                        self._record_failure(worker, failed, engine)
                    return
                finally:
                    self._end(worker)
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    # --- processes ----------------------------------------------------------------------------------------

    def _process(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> JsonProcess:
        self._count += 1
        return JsonProcess(name, command, self.folder / f"{self._count}.log", env)

    def _worker(self, name: str, engine: Engine, rows: list[Row], env: Mapping[str, str]) -> JsonProcess:
        """A process for the engine, with a folder for its files; it waits to be told what to load."""
        shape = rows[0].shape
        files = self.folder / "files"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        path = shape.write(self.folder / "models")
        start = Start(
            engine, str(path), max_model_len(rows), str(files), shape.hidden_size, shape.itemsize,
            shape.vocab_size, self.device,
        )  # fmt: skip
        full = environment(self.options.threads) | dict(env)
        python = sys.executable
        if engine.uses_vllm:
            python = self.options.vllm_python
            full |= ENVIRONMENT
        worker = self._process(name, [python, "-m", "layertap.bench.gpu.worker"], full)
        worker.ask(**start.to_json())
        return worker

    def _start(self, worker: JsonProcess, name: str, engine: Engine, rows: list[Row]) -> dict[str, Any]:
        self.note(f"{name}: starting")
        ready = worker.answer(
            self.deadline, waiting=lambda seconds: self.note(f"{name}: starting for {seconds:.0f} s")
        )
        seconds = time.time() - worker.started
        kind = engine.way.partition("-")[0]
        self._starts[kind] = max(seconds, self._starts.get(kind, 0.0))
        self.note(f"{name}: started in {seconds:.1f} s")
        return {**ready, "max_model_len": max_model_len(rows)}

    def _ask(self, worker: JsonProcess, name: str, what: str, task: Task) -> dict[str, Any]:
        worker.ask(**task.to_json())
        answer = worker.answer(
            self.deadline, waiting=lambda seconds: self.note(f"{name}: {what}, {seconds:.0f} s")
        )
        rate = answer["num_tokens"] / answer["seconds"]
        self.note(f"{name}: {what}, {answer['seconds']:.2f} s, {rate:,.0f} tokens/s")
        return answer

    def _end(self, worker: JsonProcess) -> None:
        worker.close()
        shutil.rmtree(self.folder / "files", ignore_errors=True)

    def _check_time(self, way: str) -> None:
        kind = way.partition("-")[0]
        needed = self._starts.get(kind, _START_SECONDS[kind])
        left = self.deadline - time.monotonic()
        if left < needed:
            raise OutOfTimeError(f"{max(0.0, left):.0f} s are left, and {way} takes {needed:.0f} s to start")
