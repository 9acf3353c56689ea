"""Connectors by name, or by the module that a user brings."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from layertap.config import nearest
from layertap.connectors.base import KVConnectorBase
from layertap.connectors.completing import CompletingConnector
from layertap.connectors.file import FileConnector
from layertap.connectors.memory import MemoryConnector
from layertap.connectors.transfer_config import EngineInfo, KVTransferConfig
from layertap.errors import InvalidInputError

_CONNECTORS: dict[str, type[KVConnectorBase]] = {
    "ExampleHiddenStatesConnector": FileConnector,
    "FileConnector": FileConnector,
    "LayertapConnector": FileConnector,
    "MemoryConnector": MemoryConnector,
}


def register_connector(name: str, connector: type[KVConnectorBase]) -> None:
    """Make a connector known by name.

    Raises:
        ValueError: the name is taken by another class.
    """
    if _CONNECTORS.get(name, connector) is not connector:
        raise ValueError(f"the connector name {name!r} is taken by {_CONNECTORS[name].__qualname__}")
    _CONNECTORS[name] = connector


def connector_class(config: KVTransferConfig) -> type[KVConnectorBase]:
    """The class that a configuration names.

    Raises:
        InvalidInputError: no such connector or module; the message lists the known names.
    """
    if config.kv_connector_module_path is None:
        if config.kv_connector not in _CONNECTORS:
            raise InvalidInputError(
                "kv_transfer_config.kv_connector",
                config.kv_connector,
                nearest(config.kv_connector, _CONNECTORS),
            )
        return _CONNECTORS[config.kv_connector]
    module = _load(config.kv_connector_module_path)
    found = getattr(module, config.kv_connector, None)
    if isinstance(found, type) and issubclass(found, KVConnectorBase):
        return found
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    names = [name for name, value in classes.items() if issubclass(value, KVConnectorBase)]
    raise InvalidInputError(
        "kv_transfer_config.kv_connector",
        config.kv_connector,
        f"a KVConnectorBase of {config.kv_connector_module_path}: {nearest(config.kv_connector, names)}",
    )


def create_connector(config: KVTransferConfig, engine_info: EngineInfo) -> KVConnectorBase:
    """Make the connector that a configuration names.

    Raises:
        InvalidInputError: no such connector or module, or options that the connector refuses.
    """
    connector = connector_class(config)(config, engine_info)
    if type(connector).take_completed is KVConnectorBase.take_completed:
        return CompletingConnector(connector)
    return connector


def _load(path: str) -> ModuleType:
    field = "kv_transfer_config.kv_connector_module_path"
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ImportError as error:
            raise InvalidInputError(field, path, f"a module that can be imported ({error})") from error
    file = Path(path).absolute()
    if not file.is_file():
        raise InvalidInputError(field, path, "the path of an existing .py file, or a dotted module name")
    name = f"layertap_connector_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
