"""From a file to a model that is ready to run, us and the peer in turn, each in a process of its own.

GGUF: SmolLM2-135M-Instruct (Q4_1 and Q8_0) to fp32, beside `transformers` (`gguf_file=`), which also reads the tokenizer.
Safetensors: the same weights as a Hugging Face folder in fp32, beside `safetensors.torch.load_file`; `ready` is the time
until the call returns, `read` until every weight has been summed once, because both map the file and read it late.
Peak is the largest resident memory of the process above what it had before, against the size of the weights.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import glassformer as gf
from glassformer import machine
from glassformer.convert import locate

# Run in a process of its own: argv = what, path. Prints seconds and bytes.
PROBE = """
import json, sys, time
what, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
import torch
torch.set_num_threads(threads)
if what.startswith("transformers"):
    import transformers; transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()
    from pathlib import Path
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
elif what == "safetensors":
    from safetensors.torch import load_file
else:
    import glassformer as gf
    gf.load
def memory(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
before = memory("VmRSS:")
start = time.perf_counter()
if what == "transformers gguf":
    folder, name = str(Path(path).parent), Path(path).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    weights = model.parameters()
elif what == "transformers folder":
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = model.parameters()
elif what == "safetensors":
    tensors = load_file(path + "/model.safetensors")
    weights = tensors.values()
else:
    loaded = gf.load(path, dtype=torch.float32)
    weights = loaded.model.parameters()
ready = time.perf_counter() - start
with torch.no_grad():
    weights = list(weights)
    total = sum(float(weight.sum()) for weight in weights)
read = time.perf_counter() - start
size = sum(weight.nbytes for weight in weights)
print(json.dumps({"ready": ready, "read": read, "peak": memory("VmHWM:") - before, "size": size, "sum": total}))
"""


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Medians over `rounds` of each side, taken in turn."""
    gguf = str(locate("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        loaded = gf.load(gguf)
        gf.save(loaded.model, loaded.tokenizer, folder)
        pairs = [
            ("SmolLM2 GGUF to fp32", "glassformer", "transformers gguf", gguf),
            ("fp32 folder, weights alone", "glassformer", "safetensors", folder),
            ("fp32 folder, the model", "glassformer", "transformers folder", folder),
        ]
        rows = []
        for title, ours, peer, path in pairs:
            found: dict[str, list[dict[str, float]]] = {ours: [], peer: []}
            for _ in range(rounds):
                for side in (ours, peer):
                    found[side].append(_probe(side, path, threads or 2))
                    if not quiet:
                        print(f"{title}: {side} {found[side][-1]['read']:.3f} s", file=sys.stderr)
            rows.append({"what": title, "peer": peer, **{f"{side}_{field}": statistics.median(one[field] for one in runs)
                         for side, runs in (("ours", found[ours]), ("peer", found[peer]))
                         for field in ("ready", "read", "peak", "size")}})  # fmt: skip
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


def _probe(what: str, path: str, threads: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, what, path, str(threads)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | ready | read | peer | its ready | its read | ready, share | read, share | peak / weights | its peak |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['ours_ready']:.3f} s | {row['ours_read']:.3f} s | {row['peer']} "
            f"| {row['peer_ready']:.3f} s | {row['peer_read']:.3f} s | {row['ours_ready'] / row['peer_ready']:.2f} "
            f"| {row['ours_read'] / row['peer_read']:.2f} | {row['ours_peak'] / row['ours_size']:.2f} "
            f"| {row['peer_peak'] / row['peer_size']:.2f} |"
        )
    return "\n".join(lines)
