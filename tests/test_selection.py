import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers
from layertap.selection import Selection

SERVED = ServedLayers((5, 2, 2, "norm"), 6)


def test_the_default_keeps_everything_that_is_served():
    selection = Selection.parse(None, SERVED)
    assert selection.layer_ids == (5, 2, 2, "norm")
    assert selection.columns == (1, 0, 0, 2)
    assert selection.positions(7) == range(7)
    assert (selection.dtype, selection.include_output_tokens) == ("auto", False)


def test_layers_are_a_subset_in_the_order_asked():
    assert Selection.parse({"layers": ["norm", 2]}, SERVED).columns == (2, 0)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"layers": [3]}, "kv_transfer_params.layers"),
        ({"layers": [9]}, "kv_transfer_params.layers"),
        ({"tokens": "first"}, "kv_transfer_params.tokens"),
        ({"tokens": {"start": 1, "step": 2}}, "kv_transfer_params.tokens"),
        ({"tokens": {}}, "kv_transfer_params.tokens"),
        ({"tokens": {"start": 1.5}}, "kv_transfer_params.tokens"),
        ({"tokens": []}, "kv_transfer_params.tokens"),
        ({"tokens": [1, True]}, "kv_transfer_params.tokens"),
        ({"tokens": 3}, "kv_transfer_params.tokens"),
        ({"tokens": slice(0, 8, 2)}, "kv_transfer_params.tokens"),
        ({"include_output_tokens": 1}, "kv_transfer_params.include_output_tokens"),
        ({"dtype": "int8"}, "kv_transfer_params.dtype"),
        ({"hidden_states_path": "/etc/x"}, "kv_transfer_params.hidden_states_path"),
        ("all", "kv_transfer_params"),
    ],
)
def test_wrong_fields_are_named(params, field):
    with pytest.raises(InvalidInputError) as caught:
        Selection.parse(params, SERVED)
    assert caught.value.field == field


def test_vllm_flags_are_accepted_without_effect():
    assert Selection.parse({"do_remote_decode": True}, SERVED) == Selection.parse(None, SERVED)


bounds = st.none() | st.integers(-30, 30)


@given(bounds, bounds, st.integers(1, 20))
def test_a_slice_keeps_what_python_keeps(start, end, length):
    kept = list(range(length))[start:end]
    params = {"tokens": {"start": start, "end": end}}
    selection = Selection.parse(params, SERVED)
    if kept:
        assert list(selection.positions(length)) == kept
    else:
        with pytest.raises(InvalidInputError, match="at least one"):
            selection.check_length(length)


@given(st.lists(st.integers(-25, 25), min_size=1, max_size=8), st.integers(1, 20))
def test_a_list_keeps_its_order_and_counts_from_either_end(wanted, length):
    selection = Selection.parse({"tokens": wanted}, SERVED)
    tokens = list(range(length))
    try:
        kept = [tokens[p] for p in wanted]
    except IndexError:
        with pytest.raises(InvalidInputError, match="positions from"):
            selection.check_length(length)
    else:
        assert list(selection.positions(length)) == kept


def test_last_is_the_last_position():
    assert list(Selection.parse({"tokens": "last"}, SERVED).positions(9)) == [8]
