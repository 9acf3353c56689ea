"""Memory does not depend on the number of prompts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import resource, sys
from layertap.cli import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def test_2000_prompts_need_no_more_memory_than_64(tiny: Callable[..., str], tmp_path: Path) -> None:
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    prompts = tmp_path / "p.jsonl"
    with open(prompts, "w") as file:
        for i in range(2000):
            ids = [3 + (i * 7 + j * j) % 150 for j in range(30)]
            file.write(json.dumps({"id": f"p{i}", "prompt_token_ids": ids}) + "\n")
    peak = {}
    for count in (64, 2000):
        command = [
            sys.executable, "-c", SCRIPT, "extract", tiny("llama"), "--prompts", str(prompts),
            "--layers", "all", "--skip-tokenizer-init",
            "--output", str(tmp_path / f"{count}"), "--limit", str(count),
            "--kv-cache-memory-bytes", str(8 << 20), "--max-model-len", "256",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peak[count] = int(result.stderr.split()[-1])
    assert peak[2000] < 1.1 * peak[64], peak
