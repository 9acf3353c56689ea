"""What is read of vLLM's configuration, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers
from layertap.vllm.plan import (
    CachePlan,
    UnsupportedVllmError,
    as_BSCH,
    cache_of,
    check_version,
    find_group,
    served_layers,
    writes_slots_last,
)


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.32.0+cpu", "0.32.1rc1"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "dev"])
def test_an_unsupported_version_is_refused_with_the_supported_range(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=r"0\.26 to 0\.32"):
        check_version(version)


@pytest.mark.parametrize("ids", [None, [], [2, 2, 5], [-1], [31], ["norm"], [True]])
def test_ids_that_vllm_cannot_capture_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="eagle_aux_hidden_state_layer_ids"):
        served_layers(ids, 30, None)


def test_columns_come_as_asked_with_repetitions() -> None:
    served = served_layers([2, 5, 10], 30, [5, 2, 10, 2])
    assert served.ids == (5, 2, 10, 2)
    assert served.columns == (2, 5, 10)
    assert served.columns_of(served.ids) == (1, 0, 2, 0)


def test_columns_must_be_those_that_are_captured() -> None:
    with pytest.raises(InvalidInputError, match="layers"):
        served_layers([2, 5, 10], 30, [2, 5])


class HiddenStateCacheSpec:
    block_size = 16


def group(names: list[str], spec: Any) -> Any:
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec)


def test_the_group_is_found_by_name_by_type_or_because_it_is_the_only_one() -> None:
    other = group(["model.layers.0.self_attn"], SimpleNamespace(block_size=32))
    hidden = group(["cache_only_layers.5"], SimpleNamespace(block_size=16))
    assert find_group([other, hidden]) == 1
    assert find_group([other, group([], HiddenStateCacheSpec())]) == 1
    assert find_group([other]) == 0
    with pytest.raises(UnsupportedVllmError, match="SimpleNamespace"):
        find_group([other, other])


def plan(num_blocks: int = 7, block_size: int = 4, columns: int = 3, hidden_size: int = 8) -> CachePlan:
    layers = ServedLayers(tuple(range(columns)), 30)
    return CachePlan("m", layers, hidden_size, 0, block_size, num_blocks)


def test_both_orders_of_the_cache_give_the_same_view() -> None:
    states = torch.arange(7 * 4 * 3 * 8).view(7, 4, 3, 8)
    assert torch.equal(as_BSCH(states, plan(), slots_last=False), states)
    theirs = states.transpose(1, 2).contiguous()
    assert torch.equal(as_BSCH(theirs, plan(), slots_last=True), states)


def test_a_cache_of_another_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(UnsupportedVllmError, match=r"\(7, 4, 3, 8\).*\(7, 3, 4, 8\)"):
        as_BSCH(torch.zeros(7, 4, 3, 8), plan(), slots_last=True)


def test_the_writer_tells_the_order_even_where_the_shape_does_not() -> None:
    def like_026(to_cache: Any, cache: Any, slots: Any) -> None:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = to_cache

    def like_032(to_cache: Any, cache: Any, slots: Any) -> None:
        cache[slots // cache.shape[2], :, slots % cache.shape[2]] = to_cache

    assert not writes_slots_last(like_026)
    assert writes_slots_last(like_032)
    with pytest.raises(UnsupportedVllmError):
        writes_slots_last(lambda to_cache, cache, slots: None)


def test_a_rank_without_the_cache_has_none_and_two_are_refused() -> None:
    cache = torch.zeros(1)
    assert cache_of({"model.layers.0": cache}) is None
    assert cache_of({"model.layers.0": cache, "cache_only_layers.5": cache}) is cache
    with pytest.raises(UnsupportedVllmError):
        cache_of({"cache_only_layers.5": cache, "draft.cache_only_layers.5": cache})
