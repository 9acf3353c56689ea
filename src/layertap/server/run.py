"""From flags to a listening server, and from a signal to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from layertap.config import EngineConfig, check_engine_name, layers_of_speculative_config
from layertap.connectors.memory import MemoryConnector
from layertap.connectors.registry import connector_class
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.engine.verifier import pick_device
from layertap.errors import InvalidInputError
from layertap.layers import format_layers
from layertap.server.app import build_app
from layertap.server.engine import AsyncEngine
from layertap.server.service import Limits, Service
from layertap.server.storage import Storage, take_limits
from layertap.server.tokenizing import Tokenizing

logger = logging.getLogger("layertap")

_ENGINE_FIELDS = (
    "tokenizer", "revision", "dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "seed", "trust_remote_code",
    "enforce_eager", "load_format", "skip_tokenizer_init", "device", "tensor_parallel_size",
    "data_parallel_size", "extract_only",
)  # fmt: skip


def transfer_config(args: argparse.Namespace) -> KVTransferConfig | None:
    """Where records go, by ``--kv-transfer-config`` or by ``--storage`` and its companions.

    Raises:
        InvalidInputError: both, or a connector that a server cannot use.
    """
    short = {
        "shared_storage_path": args.storage, "ttl_seconds": args.ttl_seconds, "max_bytes": args.max_bytes,
    }  # fmt: skip
    short = {name: value for name, value in short.items() if value is not None}
    if args.kv_transfer_config is not None:
        if "shared_storage_path" in short:
            raise InvalidInputError(
                "--storage", args.storage, "nothing beside --kv-transfer-config, which names it"
            )
        config = KVTransferConfig.from_dict(args.kv_transfer_config)
        extra = {**config.kv_connector_extra_config, **short}
        config = replace(config, kv_connector_extra_config=extra)
    else:
        config = KVTransferConfig("FileConnector", kv_connector_extra_config=short)
    if issubclass(connector_class(config), MemoryConnector):
        raise InvalidInputError(
            "kv_transfer_config.kv_connector",
            config.kv_connector,
            "a connector whose records clients can reach, such as ExampleHiddenStatesConnector; for answers "
            "without a file, requests send kv_transfer_params {'inline': true}",
        )
    return config


def build_service(args: argparse.Namespace) -> Service:
    """Load the model and everything around it.

    Raises:
        InvalidInputError: a flag is wrong.
        UnsupportedModelError: the model cannot be run.
    """
    layers = args.layers
    if args.speculative_config is not None:
        if layers is not None:
            raise InvalidInputError(
                "--layers", layers, "nothing beside --speculative-config, which names them"
            )
        layers = layers_of_speculative_config(args.speculative_config)
    transfer = None
    most, ttl = None, None
    if layers is not None:
        transfer = transfer_config(args)
        assert transfer is not None
        extra, most, ttl = take_limits(transfer.kv_connector_extra_config)
        transfer = replace(transfer, kv_connector_extra_config=extra)
    elif args.kv_transfer_config is not None or args.storage is not None:
        raise InvalidInputError("--layers", None, "layers to extract, as there is a place to store them")
    if args.pipeline_parallel_size != 1:
        raise InvalidInputError(
            "--pipeline-parallel-size", args.pipeline_parallel_size, "1 with --engine torch"
        )
    values = {name: getattr(args, name) for name in _ENGINE_FIELDS}
    config = EngineConfig.from_kwargs(args.model, {**values, "layers": layers})
    engine, tokenizer = _engine(config, transfer)
    if args.chat_template is not None:
        tokenizer.chat_template = _template(args.chat_template)
    folder = engine.facts.storage_path
    storage = Storage(folder, most, ttl) if folder is not None else None
    limits = Limits(args.max_body_bytes, args.max_inline_bytes, args.max_logprobs)
    names = args.served_model_name or [args.model]
    return Service(engine, Tokenizing(tokenizer, engine.facts.vocab_size), names, storage, limits)


def _engine(config: EngineConfig, transfer: KVTransferConfig | None) -> tuple[AsyncEngine, Any]:
    """The engine, or engines, and a tokenizer for the HTTP side.

    An engine on a GPU has a process of its own: the thread that feeds the GPU and the one that speaks HTTP
    would hold each other up in one interpreter. On a CPU the model's own threads have the cores anyway, and
    one process starts sooner.
    """
    if config.data_parallel_size == 1 and pick_device(config).type == "cpu":
        from layertap.server.local import LocalEngine

        local = LocalEngine(config, transfer)
        return local, local.tokenizer
    from layertap.engine import loader
    from layertap.server.replicas import ReplicaEngine

    source = loader.prepare_source(config.model)  # once, before several processes would
    engine = ReplicaEngine(config, transfer, config.data_parallel_size)
    try:
        tokenizer = loader.load_tokenizer(config, source)  # while the engines start
        engine.wait_ready()
    except BaseException:  # a signal among them
        engine.kill()
        raise
    return engine, tokenizer


def _template(given: str) -> str:
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as e:
        raise InvalidInputError("--chat-template", given, f"a readable file ({e.strerror})") from None


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Ends with status 0 on SIGTERM and SIGINT, and by itself when the engine has died."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._announce = announce
        self.engine_died = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()  # it listens: who connects now is answered

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        if not self._engine.alive:
            self.engine_died = True
            logger.error("the engine has died: the server ends")
            return True
        return bool(await super().on_tick(counter))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: who connects before the model is loaded is told so at once.

    Raises:
        InvalidInputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as e:
        bound.close()
        raise InvalidInputError("--port", f"{host}:{port}", f"an address that is free ({e})") from None
    return bound


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status."""
    bound = listen(args.host, args.port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server listens
    try:
        service = build_service(args)
    except BaseException:
        bound.close()
        raise
    app = build_app(service, args.api_key, args.root_path)
    # What is here now stays: the collector need not go through the objects of model and libraries any more.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_graceful_shutdown=max(1, round(args.shutdown_timeout)),
        timeout_keep_alive=75,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        lifespan="on",
    )
    server = _Server(config, service.engine, lambda: _announce(args, service, bound))
    asyncio.run(server.serve([bound]))
    if server.engine_died or not server.started:
        return 1
    return 0


def _announce(args: argparse.Namespace, service: Service, bound: socket.socket) -> None:
    host, port = bound.getsockname()[:2]
    scheme = "https" if args.ssl_certfile else "http"
    facts = service.facts
    what = ""
    if facts.layers is not None:
        what = f", layers {format_layers(facts.layers.ids)} of {facts.layers.num_hidden_layers}"
        what += f", records in {facts.storage_path}" if facts.storage_path else ""
    print(
        f"layertap: serving {service.model_names[0]} on {scheme}://{host}:{port}{what}\n"
        f"layertap: {what_requests_get(service)}",
        file=sys.stderr,
        flush=True,
    )


def what_requests_get(service: Service) -> str:
    """What a request gets that asks for nothing special, and where to ask for something else, in one line."""
    facts = service.facts
    if facts.layers is None:
        return (
            "requests get no hidden states: to have them, start with --layers IDS (such as eagle3 or all) "
            "or --speculative-config"
        )
    chosen = "layers, tokens, include_output_tokens, dtype" + (", inline" if service.storage else "")
    return (
        f"each request gets the states of all its prompt tokens at all these layers, in {facts.dtype}; its "
        f"kv_transfer_params choose otherwise ({chosen})"
    )


def main(argv: Sequence[str]) -> int:
    """``layertap serve``, from its arguments to its exit status.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    from layertap.server import flags

    engine = flags.engine_of(argv)
    check_engine_name(engine, "--engine")
    if engine == "vllm":
        from layertap.vllm.launcher import run

        run(argv)
    return serve(flags.parse(argv))
