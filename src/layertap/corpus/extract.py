"""Extraction of a whole dataset into a folder, one record for each prompt, resumable at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from layertap.config import check_engine_name
from layertap.corpus.names import RecordNames
from layertap.corpus.prompts import PromptLine, PromptsFormat, lines_of, read_prompts
from layertap.corpus.resume import RunIdentity, check_existing, claim_folder
from layertap.errors import ExtractionError, InvalidInputError
from layertap.layers import LayerSpec, format_layers
from layertap.layout import HIDDEN_STATES, read_header
from layertap.llm import LLM
from layertap.outputs import RequestOutput
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection, parse_tokens
from layertap.sinks.file import SUFFIX, remove_orphans

Status = Literal["written", "kept", "remade", "failed"]
_FAILURES_KEPT = 20
_FULL = 8
"""Records in a row that found no space, after which there is none."""


@dataclass(frozen=True, slots=True)
class CorpusResult:
    """What became of one prompt."""

    index: int
    where: str
    """``"prompts.jsonl:17"``"""
    id: str | None
    """The line's own id."""
    status: Status
    """``written``; ``kept``: it was there and intact; ``remade``: it was there, but broken; ``failed``."""
    path: str | None = None
    """The record's file; None if the prompt failed."""
    num_tokens: int = 0
    """Prompt tokens."""
    num_rows: int = 0
    """T, the tokens whose states the record holds."""
    num_bytes: int = 0
    """Size of the file."""
    reason: str | None = None
    """Why it failed, or why it was made again."""


@dataclass(slots=True)
class CorpusSummary:
    """Counts over a whole run."""

    output: str
    layers: str = ""
    written: int = 0
    kept: int = 0
    remade: int = 0
    failed: int = 0
    tokens: int = 0
    """Prompt tokens that were computed (or came from the prefix cache) in this run."""
    bytes_written: int = 0
    leftovers_removed: int = 0
    """Temporary files of an earlier run that was killed."""
    foreign_removed: int = 0
    """Records of another run, removed because of ``overwrite``."""
    seconds: float = 0.0
    """Without loading the model."""
    stopped: str | None = None
    """Why the run ended before the last prompt, if it did: there is no space left. What it had begun is not
    counted."""
    failures: list[CorpusResult] = field(default_factory=list)
    """The first few."""

    @property
    def prompts(self) -> int:
        return self.written + self.kept + self.remade + self.failed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, result: CorpusResult) -> None:
        setattr(self, result.status, getattr(self, result.status) + 1)
        if result.status in ("written", "remade"):
            self.tokens += result.num_tokens
            self.bytes_written += result.num_bytes
        elif result.status == "failed" and len(self.failures) < _FAILURES_KEPT:
            self.failures.append(result)


def extract_corpus(
    model: str,
    prompts: str | os.PathLike[str] | Iterable[Any],
    output: str | os.PathLike[str],
    *,
    layers: LayerSpec,
    tokens: Any = "all",
    storage_dtype: str = "auto",
    include_output_tokens: bool = False,
    sampling_params: SamplingParams | None = None,
    prompts_format: PromptsFormat = "auto",
    limit: int | None = None,
    overwrite: bool = False,
    fsync: bool = False,
    engine: str = "torch",
    on_start: Callable[[LLM], None] | None = None,
    on_result: Callable[[CorpusResult], None] | None = None,
    **llm_options: Any,
) -> CorpusSummary:
    """Write the hidden states of every prompt to ``output``, one ``.safetensors`` file each.

    Run again with the same arguments, it goes on where it stopped, however it stopped: complete records are
    kept (their checksums and their tokens are compared), broken ones are made again, and what a killed run
    left under temporary names is removed. Prompts are read, and results told, one by one: memory does not
    grow with their number. Where there is no space left for eight records in a row, the run stops.

    Args:
        model: Hugging Face id, local folder, ``.gguf`` file, or ``smollm2``.
        prompts: a file (see :func:`layertap.corpus.read_prompts`), ``"-"`` for standard input, or an iterable
            of prompts as :meth:`layertap.LLM.generate` takes them; objects may bring an ``id``, which names
            the file.
        output: the folder; made if it is missing.
        layers: boundaries to keep (see :mod:`layertap.layers`).
        tokens: ``"all"``, ``"last"``, a slice, ``{"start": a, "end": b}`` or a list of positions.
        storage_dtype: ``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float8_e4m3fn``.
        include_output_tokens: keep the states of generated tokens too.
        sampling_params: how to generate; None generates nothing (and the torch engine runs no layer above the
            highest tapped one).
        limit: stop after this many prompts.
        overwrite: make every record again, and remove records of other runs from the folder.
        fsync: flush each file to the device before it gets its name.
        engine: ``"torch"`` or ``"vllm"``, as :class:`layertap.LLM` takes it. A run may go on with the
            other one: records of either are kept.
        on_start: called once the model is loaded.
        on_result: called for each prompt, in the order in which they end.
        llm_options: keyword arguments of :class:`layertap.LLM`.

    Raises:
        InvalidInputError: a wrong argument, or a folder that holds records of another model, other layers or
            another dtype. What is wrong with single prompts is told in their results, and the others run.
        UnsupportedModelError: the model cannot be run with a result that is known to be right.
    """
    folder = Path(output)
    parse_tokens(tokens, "tokens")
    check_engine_name(engine)
    if limit is not None and limit < 1:
        raise InvalidInputError("limit", limit, "an integer from 1 up")
    lines = (
        read_prompts(prompts, prompts_format) if isinstance(prompts, str | os.PathLike) else lines_of(prompts)
    )
    make_folder(folder)
    summary = CorpusSummary(str(folder), leftovers_removed=remove_orphans(folder))
    params = sampling_params or SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
    params = replace(
        params, kv_transfer_params=_transfer_params(tokens, storage_dtype, include_output_tokens)
    )
    if params.max_tokens == 0 and engine == "torch":
        llm_options.setdefault("extract_only", True)
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder),
            "fsync": fsync,
            # Nobody reads before the run is told of a record, and a killed run would leave vLLM's lock files.
            "use_synchronization_lock": False,
        },
    }
    with LLM(model, layers=layers, kv_transfer_config=transfer, engine=engine, **llm_options) as llm:
        run = _identity(llm, params)
        summary.layers = format_layers(run.layer_ids)
        summary.foreign_removed = claim_folder(folder, run, overwrite)
        if on_start is not None:
            on_start(llm)

        def tell(result: CorpusResult) -> None:
            summary.add(result)
            if on_result is not None:
                on_result(result)

        started = time.monotonic()
        try:
            extraction = _Extraction(llm, folder, run, params, overwrite, tell)
            summary.stopped = extraction.run(_first(lines, limit))
        finally:
            summary.seconds = time.monotonic() - started
    if summary.prompts == 0:
        source = os.fspath(prompts) if isinstance(prompts, str | os.PathLike) else "an iterable"
        raise InvalidInputError("prompts", source, "at least one prompt")
    return summary


def make_folder(folder: Path) -> None:
    """Make the output folder.

    Raises:
        InvalidInputError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as e:
        raise InvalidInputError(
            "output", str(folder), f"a folder that can be written ({e.strerror})"
        ) from None


def _transfer_params(tokens: Any, dtype: str, include_output_tokens: bool) -> dict[str, Any]:
    if isinstance(tokens, slice):
        tokens = {"start": tokens.start, "end": tokens.stop}
    return {"tokens": tokens, "dtype": dtype, "include_output_tokens": include_output_tokens}


def _identity(llm: LLM, params: SamplingParams) -> RunIdentity:
    served = llm.served_layers
    assert served is not None
    selection = Selection.parse(params.kv_transfer_params, served)
    return RunIdentity(
        model=llm.config.model,
        layer_ids=selection.layer_ids,
        num_hidden_layers=served.num_hidden_layers,
        storage_dtype=llm.storage_dtype(selection.dtype),
        selection=selection,
        most_output_tokens=params.max_tokens if selection.include_output_tokens else 0,
    )


def _first(lines: Iterator[PromptLine], limit: int | None) -> Iterator[PromptLine]:
    for count, line in enumerate(lines):
        if limit is not None and count >= limit:
            return
        yield line


@dataclass(frozen=True, slots=True)
class _Pending:
    line: PromptLine
    reason: str | None
    """Why the record that was there is made again."""


class _Extraction:
    """One pass over the prompts."""

    def __init__(
        self,
        llm: LLM,
        folder: Path,
        run: RunIdentity,
        params: SamplingParams,
        overwrite: bool,
        tell: Callable[[CorpusResult], None],
    ) -> None:
        self._llm = llm
        self._folder = folder
        self._run = run
        self._params = params
        self._overwrite = overwrite
        self._tell = tell
        self._pending: dict[str, _Pending] = {}
        sampling = {
            name: getattr(params, name)
            for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
        }
        self._names = RecordNames(
            {
                "model": run.model,
                "layers": format_layers(run.layer_ids),
                "transfer": params.kv_transfer_params,
                "sampling": sampling if params.max_tokens else None,
            }
        )

    def run(self, lines: Iterator[PromptLine]) -> str | None:
        """Returns why it stopped before the last line, if it did; what runs then is given up."""
        full = 0
        outcomes = self._llm.generate_as_completed(self._to_do(lines), self._params)
        with closing(outcomes):
            for name, outcome in outcomes:
                pending = self._pending.pop(name)
                if isinstance(outcome, RequestOutput) and outcome.error is None:
                    self._tell(self._stored(pending, outcome))
                    full = 0
                    continue
                problem = outcome.error if isinstance(outcome, RequestOutput) else outcome
                assert problem is not None
                reason = problem.reason if isinstance(problem, ExtractionError) else str(problem)
                self._fail(pending.line, reason)
                if isinstance(problem, ExtractionError) and problem.kind == "storage_full":
                    full += 1
                    if full == _FULL:
                        return f"no space for {full} records in a row"
        return None

    def _to_do(self, lines: Iterator[PromptLine]) -> Iterator[tuple[str, Any]]:
        """The prompts that have no good record yet, with the names of their records."""
        for line in lines:
            if line.problem is not None:
                self._fail(line, line.problem)
                continue
            try:
                prompt = self._llm.prompt_tokenizer(line.prompt, "prompt")
            except InvalidInputError as e:
                self._fail(line, str(e))
                continue
            name = self._names(line)
            path = str(self._folder / f"{name}{SUFFIX}")
            reason: str | None = None
            if not self._overwrite:
                check, reason = check_existing(path, self._run, prompt.token_ids)
                if check is not None:
                    size = os.stat(path).st_size
                    tokens = len(prompt.token_ids)
                    self._tell(
                        CorpusResult(
                            line.index, line.where, line.id, "kept", path, tokens, check.shape[0], size
                        )
                    )
                    continue
            if reason or self._overwrite:
                # Nothing that is known to be wrong stays under a final name, whatever becomes of this prompt.
                Path(path).unlink(missing_ok=True)
            self._pending[name] = _Pending(line, reason or None)
            yield name, prompt

    def _stored(self, pending: _Pending, output: RequestOutput) -> CorpusResult:
        line = pending.line
        assert output.kv_transfer_params is not None
        path = output.kv_transfer_params["hidden_states_path"]
        rows = read_header(path).tensors[HIDDEN_STATES].shape[0]
        return CorpusResult(
            line.index,
            line.where,
            line.id,
            "written" if pending.reason is None else "remade",
            path,
            len(output.prompt_token_ids),
            rows,
            os.stat(path).st_size,
            pending.reason,
        )

    def _fail(self, line: PromptLine, reason: str) -> None:
        self._tell(CorpusResult(line.index, line.where, line.id, "failed", reason=reason))
