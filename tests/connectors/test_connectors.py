from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from connectors.helpers import SERVED, paged_cache
from layertap import reader
from layertap.connectors.base import KVConnectorBase
from layertap.connectors.registry import connector_class, create_connector, register_connector
from layertap.connectors.transfer_config import EngineInfo, KVTransferConfig
from layertap.errors import ExtractionError, InvalidInputError
from layertap.selection import Selection


@dataclass
class Ended:
    request_id: str = "r"
    prompt_token_ids: list[int] = field(default_factory=lambda: list(range(10)))
    output_token_ids: list[int] = field(default_factory=lambda: [50, 51])
    num_computed_tokens: int = 11
    selection: Selection | None = field(default_factory=lambda: Selection.parse(None, SERVED))

    def token_array(self, start: int, end: int) -> np.ndarray:
        return np.array([*self.prompt_token_ids, *self.output_token_ids][start:end])


def info(cache):
    return EngineInfo(
        "tiny", SERVED, cache.shape[3], cache.dtype, cache.shape[1], cache.shape[0], cache.device
    )


def config(**extra):
    return KVTransferConfig.from_dict({"kv_role": "kv_producer", **extra})


def run(connector, *requests):
    """What an engine does until all are completed: the final answers, and the ids whose blocks came back."""
    freed, answers = set(), {}
    for request in requests:
        delayed, params = connector.request_finished(request, [4, 2, 9])
        assert params
        if not delayed:
            freed.add(request.request_id)
    for _ in range(200):
        freed |= connector.get_finished({r.request_id for r in requests})[0] or set()
        answers |= connector.take_completed()
        if len(answers) == len(requests) == len(freed):
            return answers, freed
        connector.wait(0.1)
    raise AssertionError(f"completed {answers}, freed {freed}")


def test_the_file_connector_answers_with_a_complete_file(tmp_path):
    cache = paged_cache()
    connector = create_connector(
        config(
            kv_connector="ExampleHiddenStatesConnector",
            kv_connector_extra_config={
                "shared_storage_path": str(tmp_path),
                "use_synchronization_lock": True,
            },
        ),
        info(cache),
    )
    connector.register_kv_caches({"cache_only_layers.0": cache})
    with_outputs = Selection.parse({"include_output_tokens": True}, SERVED)
    answers, _ = run(connector, Ended("a"), Ended("b", selection=with_outputs))
    assert answers["a"] == {"hidden_states_path": str(tmp_path / "a.safetensors")}
    record = reader.open(answers["a"]["hidden_states_path"], timeout=0)
    assert record.token_ids.tolist() == list(range(10))
    assert torch.equal(record.hidden_states[:8], cache[[4, 2]].flatten(0, 1))
    assert record.metadata["model"] == "tiny"
    record = reader.open(answers["b"]["hidden_states_path"])
    assert record.token_ids.tolist() == [*range(10), 50]
    assert connector.stats()["requests_completed"] == 2
    connector.close()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_memory_connector_answers_with_a_handle():
    cache = paged_cache()
    connector = create_connector(config(kv_connector="MemoryConnector"), info(cache))
    connector.register_kv_caches({"x": cache})
    answers, _ = run(connector, Ended("m"))
    assert answers == {"m": {"hidden_states_handle": "memory://m"}}
    assert len(reader.open("memory://m", timeout=0)) == 10
    assert connector.stats()["memory_bytes"] > 0
    assert reader.delete("memory://m")
    assert connector.stats()["memory_bytes"] == 0
    connector.close()


def test_a_failure_is_told_and_the_blocks_come_back():
    cache = paged_cache()
    cache[4, 0, 0, 0] = float("nan")
    connector = create_connector(config(kv_connector="MemoryConnector"), info(cache))
    connector.register_kv_caches({"x": cache})
    answers, freed = run(connector, Ended("bad"))
    assert isinstance(answers["bad"], ExtractionError)
    assert freed == {"bad"}
    connector.close()


def test_a_request_that_keeps_nothing_or_was_cut_short_is_let_go():
    cache = paged_cache()
    connector = create_connector(config(kv_connector="MemoryConnector"), info(cache))
    connector.register_kv_caches({"x": cache})
    assert connector.request_finished(Ended(selection=None), [1]) == (False, None)
    assert connector.request_finished(Ended(num_computed_tokens=9), [1]) == (False, None)
    connector.close()


def test_admission_refuses_what_would_fail_later(tmp_path):
    extra = {"shared_storage_path": str(tmp_path)}
    connector = create_connector(
        config(kv_connector="FileConnector", kv_connector_extra_config=extra), info(paged_cache())
    )
    connector.check_request({"layers": [5, 0]}, "cmpl-1")
    with pytest.raises(InvalidInputError, match="request_id"):
        connector.check_request(None, "../x")
    with pytest.raises(InvalidInputError, match="hidden_states_path"):
        connector.check_request({"hidden_states_path": "/etc/x"})
    connector.close()


def test_a_cache_of_another_shape_is_refused():
    cache = paged_cache()
    connector = create_connector(config(kv_connector="MemoryConnector"), info(cache))
    with pytest.raises(ValueError, match="hidden-state cache"):
        connector.register_kv_caches({"x": cache.transpose(1, 2)})
    connector.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_conector": "x"}, "did you mean 'kv_connector'"),
        ({"kv_role": "kv_producer"}, "kv_connector"),
        ({"kv_connector": "FileConnector", "kv_role": "kv_consumer"}, "kv_role"),
        ({"kv_connector": "FileConnector", "kv_connector_extra_config": [1]}, "an object"),
        ({"kv_connector": 3}, "kv_connector"),
        ("FileConnector", "an object"),
    ],
)
def test_wrong_transfer_configs_are_refused(given, message):
    with pytest.raises(InvalidInputError, match=message):
        KVTransferConfig.from_dict(given)


def test_vllms_other_fields_are_accepted():
    given = {"kv_connector": "FileConnector", "engine_id": "e", "kv_rank": 0, "kv_buffer_device": "cuda"}
    assert KVTransferConfig.from_dict(given) == KVTransferConfig("FileConnector")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shared_storage_pat": "/tmp"}, "did you mean 'shared_storage_path'"),
        ({"num_writer_threads": 0}, "from 1 up"),
        ({"num_writer_threads": True}, "from 1 up"),
        ({"shared_storage_path": 3}, "a path"),
        ({"fsync": "yes"}, "true or false"),
    ],
)
def test_wrong_options_are_refused(extra, message):
    with pytest.raises(InvalidInputError, match=message):
        create_connector(
            config(kv_connector="FileConnector", kv_connector_extra_config=extra), info(paged_cache())
        )


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        InvalidInputError, match=r"did you mean 'FileConnector'.*ExampleHiddenStatesConnector"
    ):
        connector_class(config(kv_connector="FileConnecter"))
    with pytest.raises(ValueError, match="taken"):
        register_connector("FileConnector", KVConnectorBase)


MINIMAL = """
from layertap.connectors.base import KVConnectorBase

class Mine(KVConnectorBase):
    def register_kv_caches(self, kv_caches):
        self.ids, self.rounds = [], 0

    def request_finished(self, request, block_ids):
        self.ids.append(request.request_id)
        return request.request_id != "now", {"where": request.request_id}

    def get_finished(self, finished_req_ids):
        self.rounds += 1
        return (set(self.ids) - {"now"} if self.rounds == 3 else None), None
"""


def test_a_minimal_connector_of_a_user_is_completed_when_it_lets_go_of_the_blocks(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINIMAL)
    connector = create_connector(
        config(kv_connector="Mine", kv_connector_module_path=str(path)), info(paged_cache())
    )
    connector.register_kv_caches({})
    assert connector.request_finished(Ended("now"), [1]) == (False, {"where": "now"})
    assert connector.request_finished(Ended("later"), [1]) == (True, {"where": "later"})
    assert connector.take_completed() == {"now": {"where": "now"}}
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_finished(set()) == (None, None)
    assert connector.take_completed() == {}
    assert connector.get_finished(set())[0] == {"later"}
    assert connector.take_completed() == {"later": {"where": "later"}}
    connector.close()


def test_a_module_or_class_that_is_not_there_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(MINIMAL)
    with pytest.raises(InvalidInputError, match="Mine"):
        connector_class(config(kv_connector="Other", kv_connector_module_path=str(tmp_path / "mine.py")))
    for path in ("no.such.module", str(tmp_path / "none.py")):
        with pytest.raises(InvalidInputError, match="kv_connector_module_path"):
            connector_class(config(kv_connector="Mine", kv_connector_module_path=path))
    module = "layertap.connectors.file"
    assert (
        connector_class(config(kv_connector="FileConnector", kv_connector_module_path=module)).__module__
        == module
    )
