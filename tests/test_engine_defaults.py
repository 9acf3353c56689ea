"""Pages of help tell what happens by default; here that is held against what does."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from layertap import cli
from layertap.commands.engine_options import ENGINE_OPTIONS, VLLM_OPTIONS
from layertap.config import EngineConfig
from layertap.engine import core, memory
from layertap.engine.compile import wants_compiled
from layertap.engine.verifier import max_model_len_of, pick_device
from layertap.engine_defaults import default_of
from layertap.server import flags

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FIELDS = {f.name: f.default for f in dataclasses.fields(EngineConfig) if f.name not in ("model", "layers")}


def help_of(annotated: Any) -> str:
    return str(get_args(annotated)[1].help)


def serve_actions() -> dict[str, argparse.Action]:
    return {
        a.option_strings[0]: a
        for a in flags.build_parser()._actions
        if a.option_strings and a.help != argparse.SUPPRESS
    }


def test_every_field_has_a_default_in_words() -> None:
    for name, value in FIELDS.items():
        words = default_of(name)
        if isinstance(value, bool):
            assert words == ("on" if value else "off")
        elif value is not None:
            assert words.split(",")[0] == str(value)
        else:
            assert words not in ("", "None")
    with pytest.raises(KeyError):
        default_of("nothing")


def test_the_words_are_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("m")
    steps = f"{core._CPU_STEP_TOKENS} on a CPU, {core._CUDA_STEP_TOKENS} on a GPU"
    assert default_of("max_num_batched_tokens") == steps

    monkeypatch.setattr(memory, "machine_memory", lambda: 10 << 30)
    assert memory.cache_bytes(config, CPU, 0) == 1 << 30
    monkeypatch.setattr(memory, "machine_memory", lambda: 100 << 30)
    assert memory.cache_bytes(config, CPU, 0) == 2 << 30
    assert "on a CPU a tenth of the memory, at most 2 GiB" in default_of("kv_cache_memory_bytes")

    def model(**stated: int) -> Any:
        text = SimpleNamespace(**stated)
        return SimpleNamespace(get_text_config=lambda decoder: text)

    assert max_model_len_of(config, model(max_position_embeddings=77)) == 77
    assert f"({max_model_len_of(config, model())} if it states none)" in default_of("max_model_len")

    assert (wants_compiled(config, GPU), wants_compiled(config, CPU)) == (True, False)
    assert default_of("enforce_eager") == "layers are compiled on a GPU, not on a CPU"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(config) == CPU
    assert default_of("device").endswith("else the CPU")


def test_extracts_flags_end_with_their_defaults() -> None:
    for name, option in {**ENGINE_OPTIONS, **VLLM_OPTIONS}.items():
        if name != "disable_log_stats":  # hidden
            assert re.search(r"; default: .+\.$", help_of(option)), name
    own = [n for n in FIELDS if n not in ("disable_log_stats", "extract_only")]  # it follows --max-tokens
    for name in own:
        assert help_of(ENGINE_OPTIONS[name]).endswith(f"; default: {default_of(name)}.")


def test_serves_flags_end_with_their_defaults_and_have_them() -> None:
    actions = serve_actions()
    args = flags.parse(["m"])
    for name in FIELDS:
        action = actions.get("--" + name.replace("_", "-"))
        if action is None:  # self_check, disable_log_stats
            continue
        told = str(action.help).partition("; default: ")[2]
        assert told == default_of(name), name
        assert getattr(args, name) == FIELDS[name], name
    with_value = [a for a in actions.values() if a.nargs != 0]
    untold = [a.option_strings[0] for a in with_value if "default" not in str(a.help)]
    assert untold == ["--speculative-config", "--kv-transfer-config"]


@pytest.mark.parametrize("command", ["extract", "serve"])
def test_help_shows_the_defaults(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with contextlib.suppress(SystemExit):  # argparse's way to end
        assert cli.main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    hidden = ("disable_log_stats", "self_check") if command == "serve" else ("disable_log_stats",)
    for name in FIELDS:
        if name not in ("extract_only", *hidden):
            assert f"; default: {default_of(name)}" in shown, name
