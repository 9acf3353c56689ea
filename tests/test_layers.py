import pytest

from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers, eagle3_layers, format_layers, parse_layers


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6)),
        ("eagle3", (2, 3, 3, 6)),
        ("0, 3,-1", (0, 3, 6)),
        ([5, 2, 10 - 4], (5, 2, 6)),
        ([2, 2, 5], (2, 2, 5)),
        ("norm", ("norm",)),
        (["norm", -7, "1"], ("norm", 0, 1)),
        (4, (4,)),
    ],
)
def test_specs_keep_order_and_duplicates(spec, ids):
    assert parse_layers(spec, 6) == ids


@pytest.mark.parametrize("spec", [7, -8, "7", [0, 7], [], "", True, [True], 1.5, [1.5], "last", None, "2,,3"])
def test_an_id_outside_the_range_or_of_another_kind_is_refused(spec):
    with pytest.raises(InvalidInputError, match="layers"):
        parse_layers(spec, 6)


def test_the_message_names_the_valid_range():
    with pytest.raises(InvalidInputError, match="from 0 to 6"):
        parse_layers(7, 6)


def test_eagle3_needs_four_layers():
    assert eagle3_layers(36) == (2, 18, 33, 36)
    with pytest.raises(InvalidInputError, match="at least 4"):
        parse_layers("eagle3", 3)


def test_the_cache_holds_each_boundary_once_in_depth_order():
    served = ServedLayers(parse_layers(["norm", 5, 2, 6, 2], 6), 6)
    assert served.columns == (2, 5, 6, "norm")
    assert served.columns_of(served.ids) == (3, 1, 0, 2, 0)
    assert served.highest == 6
    assert ServedLayers((2, 0), 6).highest == 2


def test_format_is_the_inverse_of_parse():
    ids = (5, 2, "norm", 2)
    assert parse_layers(format_layers(ids), 6) == ids
