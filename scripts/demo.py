"""`make demo`: real prompts, a real model, one file of hidden states each, checked against transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
STATES = OUTPUT / "states"
HEAT_MAP = OUTPUT / "norms.png"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
MODEL = "smollm2"


def run(*arguments: str, capture: bool = False) -> str:
    """Run one `layertap` command, as a user would."""
    print(f"\n$ layertap {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "layertap.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def largest_difference(paths: list[str]) -> float:
    """Over all tokens and layers: the distance to transformers' state, relative to that state's norm."""
    from layertap.commands.quiet import quiet_libraries

    with quiet_libraries():
        import torch
        from transformers import AutoModelForCausalLM

        from layertap.engine.loader import prepare_source
        from layertap.record import read_record

        reference = AutoModelForCausalLM.from_pretrained(
            prepare_source(MODEL).path, dtype=torch.float32
        ).eval()
        n = reference.config.num_hidden_layers
        largest = 0.0
        for path in paths:
            record = read_record(path)
            with torch.inference_mode():
                expected = reference(record.token_ids[None], output_hidden_states=True).hidden_states
                for layer_id in record.layer_ids:
                    states = record.column(layer_id)
                    if layer_id == n:  # transformers gives the last boundary only after the final norm
                        states = reference.model.norm(states)
                    wanted = expected[n if layer_id == "norm" else layer_id][0]
                    largest = max(
                        largest, float(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
                    )
    return largest


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    lines = run(
        "extract", MODEL, "--prompts", str(PROMPTS.relative_to(ROOT)), "--layers", "eagle3",
        "--dtype", "float32", "--output", str(STATES.relative_to(ROOT)),
        "--output-format", "json", capture=True,
    )  # fmt: skip
    results = [json.loads(line) for line in lines.splitlines()]
    summary = results.pop()["summary"]
    paths = [r["path"] for r in results]
    print(f"{summary['written']} files written; comparing them with transformers ...", flush=True)
    difference = largest_difference([str(ROOT / p) for p in paths])
    run("verify", str(STATES.relative_to(ROOT)))
    run("inspect", str(STATES.relative_to(ROOT)), "--plot", str(HEAT_MAP.relative_to(ROOT)))
    tokens, seconds, rate = (summary[name] for name in ("tokens", "seconds", "tokens_per_second"))
    print(f"\n{tokens} tokens in {seconds:.2f} s: {rate:,.0f} tokens/s")
    print(f"largest relative difference to transformers (float32, every token and layer): {difference:.1e}")
    print(f"heat map: {HEAT_MAP}")


if __name__ == "__main__":
    main()
