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
from layertap.errors import InvalidInputError
from layertap.sizes import parse_size

_SIZES = {
    "max_model_len": 1, "max_num_batched_tokens": 1, "kv_cache_memory_bytes": 1,
    "max_body_bytes": 0, "max_inline_bytes": 0, "max_bytes": 0,
}  # fmt: skip
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
    add("--tokenizer", help="where the tokenizer comes from; default: the model")
    add("--revision", help="branch, tag or commit on the hub")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add(
        "--max-model-len",
        help="longest sequence, prompt and output together (1k = 1000, 1K = 1024)",
    )
    add("--max-num-batched-tokens", help="tokens computed in one step")
    add("--max-num-seqs", type=int, default=256, help="sequences in flight at once")
    add("--block-size", type=int, default=16, help="tokens in one cache block")
    add("--kv-cache-memory-bytes", help="memory of the KV and hidden-state cache together")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory to use")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--seed", type=int, default=0)
    add("--trust-remote-code", action="store_true", help="run model code that comes with the checkpoint")
    add("--enforce-eager", action="store_true", help="compile nothing: slower, but starts at once")
    add("--load-format", default="auto", help="auto, safetensors, gguf or dummy")
    add("--skip-tokenizer-init", action="store_true", help="prompts are token ids only")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--tensor-parallel-size", "-tp", type=int, default=1, help="above 1 only with --engine vllm")
    add("--pipeline-parallel-size", "-pp", type=int, default=1, help="above 1 only with --engine vllm")
    add("--data-parallel-size", "-dp", type=int, default=1, help="engine processes behind one port")
    add(
        "--extract-only",
        action="store_true",
        help="generate nothing; run the layers up to the highest tapped one",
    )


def _serving_flags(add: Add) -> None:
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add(
        "--api-key", action="append", nargs="+", default=[], help="accepted bearer tokens; also $VLLM_API_KEY"
    )
    add("--served-model-name", nargs="+", help="ids of the model in the API; default: MODEL as given")
    add("--root-path", default="", help="path prefix that a proxy strips")
    add("--ssl-keyfile")
    add("--ssl-certfile")
    add("--chat-template", help="file with a chat template, or the template; default: the tokenizer's")
    add("--max-logprobs", type=int, default=20, help="most log-probabilities a request may ask for")
    add("--max-body-bytes", default="64MiB", help="larger request bodies get 413")
    add("--max-inline-bytes", default="16MiB", help="largest record that is answered inline")
    add(
        "--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM"
    )
    add("--uvicorn-log-level", default="info", help="debug, info, warning or error")
    add("--disable-uvicorn-access-log", action="store_true")
    add("--disable-log-requests", "--no-enable-log-requests", action="store_true", help="the default")
    add("--enable-log-requests", action="store_true", help="log each request's id, length and parameters")


def _extraction_flags(add: Add) -> None:
    add(
        "--layers",
        type=_layers,
        help="layers to extract: 3,18,33,36, all, eagle3, norm; -1 is after the last",
    )
    add("--storage", "--output", metavar="DIR", help="folder for the records; default /tmp/hidden_states")
    add("--ttl-seconds", type=float, help="remove records that nobody has read for so long")
    add("--max-bytes", help="records may take this much; then requests get 507")
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
    parser.add_argument("--engine", default="torch", help="torch, or vllm: vLLM itself with our connector")
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
    for name, least in _SIZES.items():
        given = getattr(args, name)
        if given is not None:
            setattr(args, name, parse_size(given, "--" + name.replace("_", "-"), least))
    environment = os.environ.get("LAYERTAP_API_KEY") or os.environ.get("VLLM_API_KEY")
    args.api_key = [key for group in args.api_key for key in group] or ([environment] if environment else [])
    return args
