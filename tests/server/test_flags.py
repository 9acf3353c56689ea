"""The command line of ``layertap serve``."""

from __future__ import annotations

from typing import Any

import pytest

from layertap.config import layers_of_speculative_config
from layertap.errors import InvalidInputError
from layertap.server import flags
from layertap.server.run import build_service, main, transfer_config

SPECULATIVE = (
    '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": '
    '{"hf_config": {"eagle_aux_hidden_state_layer_ids": [3, 18, 33, 36]}}}'
)
TRANSFER = (
    '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", '
    '"kv_connector_extra_config": {"shared_storage_path": "/tmp/hidden_states"}}'
)


def test_vllms_command_is_understood() -> None:
    given = ["Qwen/Qwen3-8B", "--speculative_config", SPECULATIVE, "--kv_transfer_config", TRANSFER]
    args = flags.parse(given)
    assert args.model == "Qwen/Qwen3-8B"
    assert layers_of_speculative_config(args.speculative_config) == [3, 18, 33, 36]
    config = transfer_config(args)
    assert config is not None
    assert config.kv_connector_extra_config == {"shared_storage_path": "/tmp/hidden_states"}


@pytest.mark.parametrize("spelling", ["--max-model-len", "--max_model_len"])
@pytest.mark.parametrize("value", ["4096", "4K"])
def test_dashes_underscores_and_equals_are_the_same(spelling: str, value: str) -> None:
    assert flags.parse(["m", spelling, value]).max_model_len == 4096
    assert flags.parse([f"{spelling}={value}", "m"]).max_model_len == 4096


def test_vllms_common_flags_keep_their_names() -> None:
    line = (
        "m --host 127.0.0.1 --port 1 --api-key a b --served-model-name x y --max-num-batched-tokens 8k "
        "--max-num-seqs 7 --dtype half --seed 3 --disable-log-requests --no-enable-prefix-caching -tp 1 "
        "-dp 2 --gpu-memory-utilization 0.5 --trust-remote-code --enforce-eager --swap-space 4"
    )
    args = flags.parse(line.split())
    assert (args.api_key, args.served_model_name) == (["a", "b"], ["x", "y"])
    assert (args.max_num_batched_tokens, args.max_num_seqs, args.seed) == (8000, 7, 3)
    assert (args.enable_prefix_caching, args.data_parallel_size) == (False, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--max-model-length", "5"], "--max-model-len"),
        (["m", "--layer", "3"], "--layers"),
        (["m", "--xyzzy"], "unknown"),
        (["m", "n"], "one MODEL"),
        ([], "MODEL"),
        (["m", "--port", "x"], "--port"),
        (["m", "--kv-transfer-config", "{"], "valid JSON"),
        (["m", "--max-model-len", "many"], "--max-model-len: got .many.; allowed: a whole number"),
    ],
)
def test_what_is_wrong_is_said(argv: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        flags.parse(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--layers", "1", "--speculative-config", SPECULATIVE], "--layers"),
        (["--layers", "99"], "layers"),
        (["--storage", "/tmp/x"], "--layers"),
        (["--layers", "1", "--storage", "/tmp/x", "--kv-transfer-config", TRANSFER], "--storage"),
        (["--layers", "1", "--kv-transfer-config", '{"kv_connector": "MemoryConnector"}'], "inline"),
        (["--layers", "1", "--ttl-seconds", "-1"], "ttl_seconds"),
        (["--layers", "1", "--kv-transfer-config", '{"kv_connector": "Nope"}'], "Connector"),
        (["--layers", "1", "-pp", "2"], "pipeline"),
        (["--layers", "1", "--chat-template", "/no/such/file"], "chat-template"),
    ],
)
def test_contradictions_are_refused_at_start(chat_model: str, argv: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build_service(flags.parse([chat_model, "--device", "cpu", "--kv-cache-memory-bytes", "16MiB", *argv]))


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert flags.parse(["m"]).api_key == ["k"]
    assert flags.parse(["m", "--api-key", "j"]).api_key == ["j"]


def test_help_lists_the_flags(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        flags.parse(["--help"])
    assert stopped.value.code == 0
    assert "--kv-transfer-config" in capsys.readouterr().out


def test_with_vllm_the_launcher_gets_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def run(argv: list[str]) -> None:
        taken.append(list(argv))
        raise SystemExit(0)

    monkeypatch.setattr("layertap.vllm.launcher.run", run)
    argv = ["m", "--engine", "vllm", "--layers", "1", "--some-flag-of-vllm", "3"]
    with pytest.raises(SystemExit):
        main(argv)
    assert taken == [argv]
    with pytest.raises(InvalidInputError, match="--engine"):
        main(["m", "--engine", "jax"])
