"""From what a user writes to the two configurations that vLLM takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from layertap.config import nearest
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.errors import InvalidInputError
from layertap.layers import NORM, LayerSpec, parse_layers

CONNECTOR = "LayertapConnector"
MODULE = "layertap.vllm"
# Names that mean our connector: a command written for vLLM's own one runs unchanged.
NAMES = (CONNECTOR, "ExampleHiddenStatesConnector", "FileConnector")


def layer_ids(spec: LayerSpec, num_hidden_layers: int, field: str = "layers") -> tuple[int, ...]:
    """The ids that a user asked for, in order, repetitions kept.

    Raises:
        InvalidInputError: an id outside the range, or ``"norm"``, which vLLM does not hand out.
    """
    ids = parse_layers(spec, num_hidden_layers, field)
    if NORM in ids:
        raise InvalidInputError(
            field, NORM, f"ids from 0 to {num_hidden_layers}: vLLM hands out no state after the final norm; "
            "apply the norm to the last one, or use engine='torch'"
        )  # fmt: skip
    return tuple(int(i) for i in ids)


def speculative_config(ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's ``speculative_config``: each id once, in the order in which vLLM captures them."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted(set(ids))}},
    }


def transfer_config(
    given: Mapping[str, Any] | KVTransferConfig, ids: Sequence[int], **more: Any
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` with our connector in it.

    Args:
        ids: the columns of a record by default.
        more: further options of the connector.

    Raises:
        InvalidInputError: another connector, or a wrong value.
    """
    transfer = given if isinstance(given, KVTransferConfig) else KVTransferConfig.from_dict(given)
    name = "kv_transfer_config"
    if transfer.kv_connector not in NAMES:
        raise InvalidInputError(
            f"{name}.kv_connector", transfer.kv_connector, nearest(transfer.kv_connector, NAMES)
        )
    if transfer.kv_connector_module_path not in (None, MODULE):
        raise InvalidInputError(
            f"{name}.kv_connector_module_path", transfer.kv_connector_module_path, f"none, or {MODULE!r}"
        )
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {**transfer.kv_connector_extra_config, **more, "layers": list(ids)},
    }


def model_layers(model: str, trust_remote_code: bool = False, revision: str | None = None) -> tuple[str, int]:
    """The folder or hub id that vLLM can load, and its number of decoder layers.

    Raises:
        InvalidInputError: no such model, or one whose configuration cannot be read.
    """
    from layertap.config import EngineConfig
    from layertap.engine.loader import load_config, num_hidden_layers, prepare_source

    source = prepare_source(model)
    config = EngineConfig(model, trust_remote_code=trust_remote_code, revision=revision)
    return source.path, num_hidden_layers(load_config(source, config))


def prepare_cpu(arguments: dict[str, Any]) -> None:
    """What vLLM's CPU build wants, unless the user has said otherwise."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    arguments.setdefault("enforce_eager", True)
    arguments.setdefault("gpu_memory_utilization", 0.3)
    arguments.setdefault("kv_cache_memory_bytes", 1 << 30)
    size = int(arguments.get("tensor_parallel_size", 1))
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))  # else vLLM takes one thread
