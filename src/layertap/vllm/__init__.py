"""layertap inside vLLM: the connector, the launcher and the ``LLM(engine="vllm")`` adapter.

``kv_connector_module_path`` is this package; vLLM is imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layertap.vllm.connector import LayertapConnector

__all__ = ["LayertapConnector"]


def __getattr__(name: str) -> Any:
    if name == "LayertapConnector":
        from layertap.vllm.connector import LayertapConnector

        return LayertapConnector
    raise AttributeError(f"module 'layertap.vllm' has no attribute {name!r}")
