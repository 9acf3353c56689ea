"""``layertap serve --engine vllm``: starts ``vllm serve`` with our connector in it.

Our own flags are read here; every other one goes to vLLM as it is. Flags may be written with ``-`` or ``_``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layertap.config import layers_of_speculative_config
from layertap.errors import InvalidInputError
from layertap.layers import LayerSpec
from layertap.vllm.arguments import layer_ids, model_layers, speculative_config, transfer_config

SERVED_LAYERS_ENV = "LAYERTAP_SERVED_LAYERS"
"""Tells :mod:`layertap.vllm.middleware` what is served: ``{"ids": [...], "total": N}``."""
MIDDLEWARE = "layertap.vllm.middleware.CheckTransferParams"
DEFAULT_FOLDER = "/tmp/hidden_states"

# Flags with a value that are ours to read.
_OURS = ("--layers", "--speculative-config", "--kv-transfer-config", "--output", "--engine", "--revision")
_SHORT = {"-sc": "--speculative-config", "--storage": "--output"}


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What to run."""

    arguments: list[str]
    """Of the ``vllm`` program, from ``serve`` on."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set beside the present ones."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", *self.arguments]


def serve_command(arguments: Sequence[str]) -> ServeCommand:
    """Turn ``layertap serve``'s arguments into vLLM's.

    Args:
        arguments: MODEL and flags, in any order: ``--layers`` (or vLLM's ``--speculative_config``),
            ``--storage`` (or ``--kv_transfer_config``), and any flag of ``vllm serve``.

    Raises:
        InvalidInputError: no model or no layers, or a value that is not allowed.
    """
    ours, rest = _split(arguments)
    if not rest or rest[0].startswith("-"):
        raise InvalidInputError(
            "MODEL", rest[0] if rest else None, "a Hugging Face id, a folder or 'smollm2'"
        )
    model, flags = rest[0], rest[1:]
    trusted = any(_dashed(flag) == "--trust-remote-code" for flag in flags)
    path, total = model_layers(model, trusted, ours.get("--revision"))
    ids = layer_ids(_layers(ours), total)
    given = _transfer(ours)
    transfer = transfer_config(given, ids)
    result = ["serve", path, *flags]
    if path != model and not any(_dashed(flag).split("=")[0] == "--served-model-name" for flag in flags):
        result += ["--served-model-name", model]
    if "--revision" in ours:
        result += ["--revision", ours["--revision"]]
    result += ["--speculative-config", json.dumps(speculative_config(ids))]
    result += ["--kv-transfer-config", json.dumps(transfer)]
    result += ["--middleware", MIDDLEWARE]
    served = json.dumps({"ids": list(ids), "total": total})
    return ServeCommand(result, {SERVED_LAYERS_ENV: served, **_cpu_environment()})


def run(arguments: Sequence[str]) -> None:
    """Become ``vllm serve``: does not return.

    Raises:
        InvalidInputError: see :func:`serve_command`.
    """
    command = serve_command(arguments)
    os.environ.update(command.environment)
    os.execv(command.command[0], command.command)


def _dashed(flag: str) -> str:
    """``--speculative_config=x`` -> ``--speculative-config=x``; only the flag's name is touched."""
    name, equals, value = flag.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return _SHORT.get(name, name) + equals + value


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our flags by name, and the rest with the model first."""
    ours: dict[str, str] = {}
    rest: list[str] = []
    model: str | None = None
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        i += 1
        name, equals, value = _dashed(argument).partition("=")
        if name == "--model":
            name = "MODEL"
        if name in _OURS or name == "MODEL":
            if not equals:
                if i == len(arguments):
                    raise InvalidInputError(argument, None, "a value after it")
                value = arguments[i]
                i += 1
            if name == "MODEL":
                model = value
            else:
                ours[name] = value
        elif i == 1 and not argument.startswith("-"):
            model = argument
        else:
            rest.append(argument)
    if model is None and rest and not rest[-1].startswith("-") and (len(rest) == 1 or not _flag(rest[-2])):
        model = rest.pop()
    return ours, rest if model is None else [model, *rest]


def _flag(argument: str) -> bool:
    return argument.startswith("-") and "=" not in argument


def _json(flag: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(flag, text, f"JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise InvalidInputError(flag, text, "a JSON object")
    return value


def _layers(ours: Mapping[str, str]) -> LayerSpec:
    flag = "--speculative-config"
    if "--layers" in ours:
        if flag in ours:
            raise InvalidInputError("--layers", ours["--layers"], f"nothing together with {flag}")
        return ours["--layers"]
    if flag not in ours:
        raise InvalidInputError("--layers", None, f"layer ids ('3,18,-1', 'eagle3', 'all'), or {flag}")
    return layers_of_speculative_config(_json(flag, ours[flag]))


def _transfer(ours: Mapping[str, str]) -> Mapping[str, Any]:
    flag = "--kv-transfer-config"
    if flag not in ours:
        folder = ours.get("--output", DEFAULT_FOLDER)
        extra = {"shared_storage_path": folder}
        return {"kv_connector": "LayertapConnector", "kv_connector_extra_config": extra}
    if "--output" in ours:
        raise InvalidInputError("--output", ours["--output"], f"nothing together with {flag}")
    return _json(flag, ours[flag])


def _cpu_environment() -> dict[str, str]:
    """What vLLM's CPU build wants, where it is the one that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        cpu = "cpu" in version("vllm")
    except PackageNotFoundError:
        cpu = False
    wanted = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    return {name: value for name, value in wanted.items() if cpu and name not in os.environ}


def main() -> None:
    """``python -m layertap.vllm.launcher MODEL ...``"""
    try:
        run(sys.argv[1:])
    except InvalidInputError as error:
        raise SystemExit(f"layertap serve: {error}") from None


if __name__ == "__main__":
    main()
