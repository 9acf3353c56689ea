"""What the connector reads of vLLM's configuration: once, at start, the same in scheduler and worker.

Shapes: B blocks, S tokens in a block, C tapped boundaries, H hidden size. Facts about vLLM that this relies
on are listed in ``docs/vllm.md``; each is asserted here against vLLM's own objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layertap.config import SPECULATIVE_LAYERS
from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers, parse_layers

SUPPORTED = "0.26 to 0.32"
_LOWEST, _ABOVE = (0, 26), (0, 33)
METHOD = "extract_hidden_states"
CACHE_LAYER = "cache_only_layers."


class UnsupportedVllmError(RuntimeError):
    """This vLLM, or its hidden-state cache, is not what the connector knows."""


def check_version(version: str) -> None:
    """Refuse a vLLM that the connector is not made for.

    Raises:
        UnsupportedVllmError: naming the version and the supported range.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _LOWEST <= (int(found[1]), int(found[2])) < _ABOVE:
        raise UnsupportedVllmError(f"vLLM {version} is not supported; layertap works with vLLM {SUPPORTED}")


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The hidden-state cache as vLLM's configuration describes it."""

    model: str
    layers: ServedLayers
    hidden_size: int
    group: int
    """Index of the KV cache group whose block ids address the hidden states."""
    block_size: int
    """Tokens in a block of that group; other groups may have another."""
    num_blocks: int

    @classmethod
    def read(
        cls, vllm_config: Any, kv_cache_config: Any, requested: Sequence[int] | None = None
    ) -> CachePlan:
        """Read a ``VllmConfig`` and a ``KVCacheConfig``.

        Args:
            requested: the columns wanted by default, in order, duplicates kept; None takes vLLM's ids.

        Raises:
            InvalidInputError: the speculative method or its layer ids cannot be served.
            UnsupportedVllmError: the cache's group cannot be told.
        """
        speculative = vllm_config.speculative_config
        method = getattr(speculative, "method", None)
        if method != METHOD:
            raise InvalidInputError("speculative_config.method", method, f"'{METHOD}'")
        model_config = vllm_config.model_config
        total = int(model_config.get_total_num_hidden_layers())
        ids = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
        group = find_group(kv_cache_config.kv_cache_groups)
        return cls(
            model=str(getattr(model_config, "served_model_name", None) or model_config.model),
            layers=served_layers(ids, total, requested),
            hidden_size=int(model_config.get_hidden_size()),
            group=group,
            block_size=int(kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size),
            num_blocks=int(kv_cache_config.num_blocks),
        )


def served_layers(ids: Any, num_hidden_layers: int, requested: Sequence[int] | None) -> ServedLayers:
    """The layers that vLLM captures, in the order that the user wants them.

    vLLM captures each boundary once, in depth order, into as many columns as it was given ids; so its own
    list must not repeat one. ``kv_connector_extra_config.layers`` says which columns a record has by
    default.
    """
    allowed = f"distinct integers from 0 to {num_hidden_layers}"
    if not isinstance(ids, list | tuple) or not ids:
        raise InvalidInputError(SPECULATIVE_LAYERS, ids, f"a non-empty list of {allowed}")
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_hidden_layers:
            raise InvalidInputError(SPECULATIVE_LAYERS, i, allowed)
    if len(set(ids)) != len(ids):
        raise InvalidInputError(
            SPECULATIVE_LAYERS,
            ids,
            "each id once; kv_connector_extra_config.layers names the columns, with repetitions",
        )
    if requested is None:
        return ServedLayers(tuple(ids), num_hidden_layers)
    name = "kv_connector_extra_config.layers"
    wanted = parse_layers(list(requested), num_hidden_layers, name)
    if set(wanted) != set(ids):
        raise InvalidInputError(
            name, requested, f"the ids of {SPECULATIVE_LAYERS}, in any order: {sorted(ids)}"
        )
    return ServedLayers(wanted, num_hidden_layers)


def find_group(groups: Sequence[Any]) -> int:
    """The group of the cache-only layer: by its layer's name, else by the type of its spec.

    Under pipeline parallelism the scheduler sees the first rank's names, where the layer does not occur.
    """
    named = [i for i, g in enumerate(groups) if any(CACHE_LAYER in name for name in g.layer_names)]
    typed = [i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == "HiddenStateCacheSpec"]
    for found in (named, typed, range(len(groups))):
        if len(found) == 1:
            return found[0]
    kinds = [type(g.kv_cache_spec).__name__ for g in groups]
    raise UnsupportedVllmError(f"cannot tell the hidden-state cache among KV cache groups {kinds}")


def cache_of(kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The hidden-state cache among a worker's caches, as vLLM lays it out; None where another rank has it.

    Raises:
        UnsupportedVllmError: there is more than one.
    """
    found = {name: cache for name, cache in kv_caches.items() if CACHE_LAYER in name}
    if len(found) > 1:
        raise UnsupportedVllmError(f"expected one cache-only layer, vLLM has {sorted(found)}")
    return next(iter(found.values()), None)


def as_BSCH(cache: torch.Tensor, plan: CachePlan, slots_last: bool) -> torch.Tensor:  # noqa: N802
    """A view [B, S, C, H] of vLLM's cache, whose shape is asserted against the configuration.

    Args:
        slots_last: vLLM's order is [B, C, S, H] (0.32), not [B, S, C, H] (0.26).

    Raises:
        UnsupportedVllmError: naming both shapes.
    """
    columns = len(plan.layers.columns)
    inner = (columns, plan.block_size) if slots_last else (plan.block_size, columns)
    expected = (plan.num_blocks, *inner, plan.hidden_size)
    if tuple(cache.shape) != expected:
        raise UnsupportedVllmError(
            f"vLLM's hidden-state cache is {tuple(cache.shape)}; its configuration says {expected} "
            f"({plan.num_blocks} blocks of {plan.block_size} tokens, {columns} layers of {plan.hidden_size})"
        )
    return cache.transpose(1, 2) if slots_last else cache


def writes_slots_last(write: Any) -> bool:
    """Find out the order of the cache's dimensions by letting vLLM's own writer store one token.

    Args:
        write: ``basic_cache(to_cache, kv_cache, slot_mapping)`` of vLLM's cache-only layer.

    Raises:
        UnsupportedVllmError: it writes in neither order.
    """
    # Both inner dimensions are 2, so that the writer takes either order. Token at slot 1: two columns, 1
    # and 2.
    cache = torch.zeros(1, 2, 2, 1)
    write(torch.tensor([[[1.0], [2.0]]]), cache, torch.tensor([1]))
    if torch.equal(cache[0, :, :, 0], torch.tensor([[0.0, 0.0], [1.0, 2.0]])):
        return False
    if torch.equal(cache[0, :, :, 0], torch.tensor([[0.0, 1.0], [0.0, 2.0]])):
        return True
    raise UnsupportedVllmError(
        f"vLLM writes hidden states in an unknown order; known are those of {SUPPORTED}"
    )
