"""The flags of ``layertap serve``: vLLM's names, with ``-`` or ``_``, and ours beside them."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from layertap.config import nearest
from layertap.engine_defaults import default_of
from layertap.errors import InvalidInputError
from layertap.sizes import ENGINE_SIZES, parse_flags

_SIZES = {**ENGINE_SIZES, "max_body_bytes": 0, "max_inline_bytes": 0, "max_bytes": 0}
"""Flags that take a size, with the smallest one. They are read when all flags are known: an error can then
name its flag."""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({e})") from None


def _layers(text: str) -> list[int | str] | str:
    """``3,18,33,36``, ``all``, ``eagle3``, ``-1``, ``norm``; checked against the model when it is loaded."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    if len(words) == 1 and not re.fullmatch(r"-?\d+", words[0]):
        return words[0]
    return [int(w) if re.fullmatch(r"-?\d+", w) else w for w in words]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInputError("arguments", " ".join(sys.argv[1:]), message)


Add = Callable[..., Any]


def _engine_flags(add: Add) -> None:
    def field(flag: str, text: str, *also: str, **kwargs: Any) -> None:
        """A flag that leaves its field of ``EngineConfig`` at that class's own default."""
        action = add(flag, *also, **kwargs)
        # Set here: some versions of argparse put a default of their own behind a switch's help.
        action.help = f"{text}; default: {default_of(flag[2:].replace('-', '_'))}"

    field("--tokenizer", "where the tokenizer comes from")
    field("--revision", "branch, tag or commit on the hub")
    field("--dtype", "auto, float32, bfloat16 or float16", default="auto")
    field("--max-model-len", "longest sequence, prompt and output together (1k = 1000, 1K = 1024)")
    field("--max-num-batched-tokens", "tokens computed in one step")
    field("--max-num-seqs", "sequences in flight at once", type=int, default=256)
    field("--block-size", "tokens in one cache block", type=int, default=16)
    field("--kv-cache-memory-bytes", "memory of the KV and hidden-state cache together")
    field("--gpu-memory-utilization", "share of the GPU's memory to use", type=float, default=0.9)
    field(
        "--enable-prefix-caching",
        "compute beginnings that prompts share only once",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    field("--seed", "of dummy weights, and of requests that bring none", type=int, default=0)
    field("--trust-remote-code", "run model code that comes with the checkpoint", action="store_true")
    field(
        "--enforce-eager",
        "compile nothing: slower, but starts at once (--no-enforce-eager compiles on a CPU, too)",
        action=argparse.BooleanOptionalAction,
    )
    field("--load-format", "auto, safetensors, gguf or dummy (random weights)", default="auto")
    field("--skip-tokenizer-init", "load no tokenizer: prompts are token ids only", action="store_true")
    field("--device", "auto, cpu, cuda or cuda:N", default="auto")
    parallel: dict[str, Any] = {"type": int, "default": 1}
    field("--tensor-parallel-size", "above 1 only with --engine vllm", "-tp", **parallel)
    add("--pipeline-parallel-size", "-pp", help="above 1 only with --engine vllm; default: 1", **parallel)
    field("--data-parallel-size", "engine processes behind one port", "-dp", **parallel)
    field(
        "--extract-only",
        "generate nothing; run the layers up to the highest tapped one",
        action="store_true",
    )


def _serving_flags(add: Add) -> None:
    add("--host", default="0.0.0.0", help="address to listen on; default: %(default)s, all of them")
    add("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    add(
        "--api-key",
        action="append",
        nargs="+",
        default=[],
        help="accepted bearer tokens; default: $LAYERTAP_API_KEY or $VLLM_API_KEY, else none is asked for",
    )
    add("--served-model-name", nargs="+", help="ids of the model in the API; default: MODEL as given")
    add("--root-path", default="", help="path prefix that a proxy strips; default: none")
    add("--ssl-keyfile", help="of TLS; default: plain HTTP")
    add("--ssl-certfile", help="of TLS; default: plain HTTP")
    add("--chat-template", help="file with a chat template, or the template; default: the tokenizer's")
    add(
        "--max-logprobs",
        type=int,
        default=20,
        help="most log-probabilities a request may ask for; default: %(default)s",
    )
    add("--max-body-bytes", default="64MiB", help="larger request bodies get 413; default: %(default)s")
    add(
        "--max-inline-bytes",
        default="16MiB",
        help="largest record that is answered inline; default: %(default)s",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running requests get after SIGTERM; default: %(default)g",
    )
    add("--uvicorn-log-level", default="info", help="debug, info, warning or error; default: %(default)s")
    add("--disable-uvicorn-access-log", action="store_true", help="log no line for each HTTP request")
    add("--disable-log-requests", "--no-enable-log-requests", action="store_true", help="the default")
    add("--enable-log-requests", action="store_true", help="log each request's id, length and parameters")


def _extraction_flags(add: Add) -> None:
    add(
        "--layers",
        type=_layers,
        help="layers to extract: 3,18,33,36, all, eagle3, norm; -1 is after the last; default: none, "
        "requests get no hidden states",
    )
    add("--storage", "--output", metavar="DIR", help="folder for the records; default: /tmp/hidden_states")
    add("--ttl-seconds", type=float, help="remove records that nobody has read for so long; default: none")
    add("--max-bytes", help="records may take this much, then requests get 507; default: no limit")
    add("--speculative-config", "-sc", type=_json, metavar="JSON", help="vLLM's way to name the layers")
    add("--kv-transfer-config", type=_json, metavar="JSON", help="vLLM's way to choose connector and storage")


_WITHOUT_EFFECT: dict[str, int] = {
    "--disable-log-stats": 0, "--enable-chunked-prefill": 0, "--no-enable-chunked-prefill": 0,
    "--async-scheduling": 0, "--no-async-scheduling": 0, "--disable-frontend-multiprocessing": 0,
    "--swap-space": 1, "--distributed-executor-backend": 1, "--generation-config": 1, "--tokenizer-mode": 1,
    "--disable-hybrid-kv-cache-manager": 0, "--no-disable-hybrid-kv-cache-manager": 0,
    "--api-server-count": 1, "--max-parallel-loading-workers": 1, "--attention-backend": 1,
}  # fmt: skip
"""vLLM's flags that choose nothing here, with the number of values they take."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``layertap serve``."""
    parser = _Parser(
        prog="layertap serve",
        description="Serve a model over OpenAI's HTTP API and hand out its hidden states.",
        allow_abbrev=False,
        usage="layertap serve MODEL [--layers IDS --storage DIR] [flags]",
    )
    parser.add_argument("model", nargs="?", help="Hugging Face id, local folder, .gguf file, or smollm2")
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    parser.add_argument(
        "--engine",
        default="torch",
        help="torch, or vllm: vLLM itself with our connector (its engine flags and defaults are vLLM's own); "
        "default: %(default)s",
    )
    _extraction_flags(parser.add_argument_group("extraction").add_argument)
    _serving_flags(parser.add_argument_group("serving").add_argument)
    _engine_flags(parser.add_argument_group("engine").add_argument)
    for name, count in _WITHOUT_EFFECT.items():
        kind: dict[str, Any] = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, help=argparse.SUPPRESS, dest="_unused", default=None, **kind)
    return parser


def normalized(argv: Sequence[str]) -> list[str]:
    """``--some_flag`` and ``--some_flag=x`` with dashes in their names."""
    result = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        result.append(word)
    return result


def engine_of(argv: Sequence[str]) -> str:
    """What ``--engine`` says, without a look at the other flags: with vLLM they are its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", default="torch")
    return str(parser.parse_known_args(list(argv))[0].engine)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of one command line.

    Raises:
        InvalidInputError: an unknown flag (the nearest known one is named), or a value of the wrong form.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(normalized(argv))
    if unknown:
        word = unknown[0].partition("=")[0]
        known = [o for a in parser._actions for o in a.option_strings if a.help != argparse.SUPPRESS]
        if word.startswith("-"):
            close = nearest(word, known).partition("? ")
            hint = f"{close[0]}?" if close[1] else "see 'layertap serve --help'"
            raise InvalidInputError(word, "an unknown flag", hint)
        raise InvalidInputError("arguments", word, "one MODEL, and flags")
    if args.model and args.model_flag and args.model != args.model_flag:
        raise InvalidInputError("--model", args.model_flag, f"one model; {args.model!r} is given too")
    args.model = args.model or args.model_flag
    if not args.model:
        raise InvalidInputError("MODEL", None, "a Hugging Face id, a local folder, a .gguf file, or smollm2")
    parse_flags(vars(args), _SIZES)
    environment = os.environ.get("LAYERTAP_API_KEY") or os.environ.get("VLLM_API_KEY")
    args.api_key = [key for group in args.api_key for key in group] or ([environment] if environment else [])
    return args
