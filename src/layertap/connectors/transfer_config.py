"""What a connector is told at start: the user's ``kv_transfer_config``, and what the engine knows of
itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from layertap.config import check_names
from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers

# Fields of vLLM's KVTransferConfig that choose nothing here: they describe the consuming half, or buffers
# that staging_* replaces. Accepted so that a command line written for vLLM runs unchanged.
PASSIVE_FIELDS = (
    "engine_id",
    "kv_rank",
    "kv_parallel_size",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_ip",
    "kv_port",
    "kv_load_failure_policy",
    "enable_permute_local_kv",
)


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """vLLM's ``kv_transfer_config``, the producing half."""

    kv_connector: str
    """A name from :mod:`layertap.connectors.registry`, or a class of ``kv_connector_module_path``."""
    kv_role: str = "kv_producer"
    """Only ``kv_producer``: states leave the engine, none come in. (``kv_both`` is read as that.)"""
    kv_connector_module_path: str | None = None
    """Dotted module name, or path of a ``.py`` file, that defines the connector's class."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """The connector's own options."""

    def __post_init__(self) -> None:
        name = "kv_transfer_config"
        if not isinstance(self.kv_connector, str) or not self.kv_connector:
            raise InvalidInputError(f"{name}.kv_connector", self.kv_connector, "the name of a connector")
        if self.kv_role not in ("kv_producer", "kv_both"):
            raise InvalidInputError(f"{name}.kv_role", self.kv_role, "'kv_producer'")
        path = self.kv_connector_module_path
        if path is not None and (not isinstance(path, str) or not path):
            raise InvalidInputError(
                f"{name}.kv_connector_module_path", path, "a module or the path of a .py file"
            )
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping):
            raise InvalidInputError(f"{name}.kv_connector_extra_config", extra, "an object")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> KVTransferConfig:
        """Build from what the user wrote.

        Raises:
            InvalidInputError: an unknown key (the nearest known one is named) or a value of the wrong form.
        """
        name = "kv_transfer_config"
        if not isinstance(config, Mapping):
            raise InvalidInputError(name, config, "an object with kv_connector and kv_role")
        known = [f.name for f in fields(cls)]
        check_names({k: v for k, v in config.items() if k not in PASSIVE_FIELDS}, known, f"{name}.")
        if "kv_connector" not in config:
            raise InvalidInputError(f"{name}.kv_connector", None, "the name of a connector")
        given = {key: config[key] for key in known if key in config}
        if given.get("kv_connector_extra_config", {}) is None:
            del given["kv_connector_extra_config"]
        return cls(**given)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a connector may need to know of the engine that it serves."""

    model: str
    """The model's name, as it goes into every record."""
    layers: ServedLayers
    hidden_size: int
    dtype: torch.dtype
    """Of the hidden-state cache."""
    block_size: int
    """Tokens in one block."""
    num_blocks: int
    device: torch.device
