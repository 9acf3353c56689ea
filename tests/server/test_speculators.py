"""The released ``speculators``, from conversations to a trained EAGLE-3 draft model, against our server."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layertap.record import verify_record

from .conftest import ThreadServer, tiny_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="needs speculators"),
]
DRIVER = str(Path(__file__).with_name("speculators_on_cpu.py"))
CONVERSATIONS = 24


def speculators(*argv: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, DRIVER, *argv], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def write_conversations(path: Path) -> None:
    rng = random.Random(0)
    words = ["the", "future", "of", "hidden", "states", "is", "history", "model", "and", "words", "in"]

    def text(count: int) -> str:
        return " ".join(rng.choice(words) for _ in range(count))

    with path.open("w") as file:
        for _ in range(CONVERSATIONS):
            turns = [{"from": "human", "value": text(4)}, {"from": "gpt", "value": text(20)}]
            file.write(json.dumps({"conversations": turns * rng.choice([1, 2])}) + "\n")


def test_prepare_generate_and_train(chat_model: str, tmp_path: Path) -> None:
    storage = tmp_path / "states"
    flags = tiny_flags(chat_model, storage)
    flags[flags.index("1,3,5")] = "1,2,3,5"
    server = ThreadServer(*flags)
    try:
        write_conversations(tmp_path / "conversations.jsonl")
        data = tmp_path / "data"
        speculators(
            "prepare-data", "--model", chat_model, "--data", str(tmp_path / "conversations.jsonl"),
            "--output", str(data), "--render-endpoint", server.url, "--seq-length", "256",
            "--num-preprocessing-workers", "1",
        )  # fmt: skip
        speculators(
            "generate-offline-data", "--model", chat_model, "--endpoint", f"{server.url}/v1",
            "--preprocessed-data", str(data), "--validate-outputs", "--fail-on-error", "--max-retries", "0",
        )  # fmt: skip
        files = list((data / "hidden_states").iterdir())
        assert len(files) >= CONVERSATIONS
        assert all(verify_record(f).shape[1:] == (4, 64) for f in files)
        assert not list(storage.glob("*.safetensors"))  # the client moved them away
        for file in files:
            file.unlink()

        stored = server.core.stats()["connector"]["requests_completed"]
        log = speculators(
            "train", "--verifier-name-or-path", chat_model, "--data-path", str(data),
            "--vllm-endpoint", f"{server.url}/v1", "--on-missing", "generate",
            "--speculator-type", "eagle3", "--target-layer-ids", "1", "2", "3",
            "--draft-attn-impl", "eager", "--loss-implementation", "eager",
            "--hidden-states-dtype", "float32", "--total-seq-len", "256", "--num-workers", "0",
            "--epochs", "2", "--ttt-steps", "2",
            "--optimizer", "adamw", "--lr", "3e-3", "--scheduler-type", "none",
            "--max-retries", "0", "--save-path", str(tmp_path / "draft"),
        )  # fmt: skip
        losses = [float(x) for x in re.findall(r"train/loss=([\w.+-]+)", log)]
        assert len(losses) >= 10
        assert all(math.isfinite(x) for x in losses)
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert list((tmp_path / "draft").rglob("model.safetensors"))
        assert server.core.stats()["connector"]["requests_completed"] > stored
        assert not list(storage.glob("*.safetensors"))  # the trainer deletes what it has loaded
    finally:
        server.close()
