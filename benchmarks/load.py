"""From a file to a model that is ready to run: us and the peer in turn, each in a separate process.

GGUF: SmolLM2-135M-Instruct (Q4_1 and Q8_0) to fp32 with its tokenizer, against `transformers` (`gguf_file=`). Folder:
the same weights in fp32 without a tokenizer, against `safetensors.torch.load_file`, which gives tensors and no model,
and against `from_pretrained`. `ready` is the time until the call returns, `read` until every weight has been summed:
all loaders map the file and read it late. Peak is the largest resident memory of the process above what it had before,
against the size of the weights. Imports are done before the clock starts, and each side is run once before it counts;
folders, which take a moment, count three times a round. `load_file` builds no model and copies
nothing; we build one. Our folders have q, k and v side by side, so that they are mapped as the one matrix that computes
them; of a folder with others between them (`by name`, as `save_pretrained` writes it) their pages are mapped one after
the other. Making the modules takes time by their number, whatever the size of the weights.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer import machine
from glassformer.conversion import locate
from glassformer.errors import WorkError

LARGE = ("llama@1.5b", "llama@3b")

# Program of a separate process: argv = loader, path, threads. Prints seconds and bytes.
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
    from pathlib import Path
    from safetensors.torch import load_file
else:
    import glassformer as gf
    import glassformer.conversion.gguf, tokenizers
    gf.load
def memory(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
torch.ones(1 << 16).sum()  # the program and the threads that will read are not what loading takes
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
    tensors = [load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]  # one file, or shards
    weights = [weight for some in tensors for weight in some.values()]
else:
    loaded = gf.load(path)
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
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as by_name,
    ):
        gf.save(gf.load(gguf).model, None, folder)
        shutil.copy(f"{folder}/config.json", by_name)
        save_file(load_file(f"{folder}/model.safetensors"), f"{by_name}/model.safetensors", {"format": "pt"})
        pairs = [
            ("SmolLM2 GGUF to fp32", "glassformer", "transformers gguf", gguf),
            ("fp32 folder, only weights", "glassformer", "safetensors", folder),
            ("fp32 folder by name, only weights", "glassformer", "safetensors", by_name),
            ("fp32 folder by name, the model", "glassformer", "transformers folder", by_name),
        ]
        rows = [measured(*pair, rounds, threads or 2, quiet) for pair in pairs]
    for name in LARGE:
        with tempfile.TemporaryDirectory() as large:
            with torch.device("meta"):
                model = gf.preset(name).build(seed=None).bfloat16()
            for weight in model.to_empty(device="cpu").parameters():
                weight.data.fill_(0.01)
            gf.save(model, None, large)
            del model, weight
            title = f"bf16 folder of {name}, only weights"
            rows.append(measured(title, "glassformer", "safetensors", large, rounds, threads or 2, quiet))
    return {"machine": machine.machine(), "rows": rows, "table": table(rows)}


def measured(title: str, ours: str, peer: str, path: str, rounds: int, threads: int, quiet: bool) -> dict[str, Any]:
    """Returns a row of medians over `rounds`."""
    found: dict[str, list[dict[str, float]]] = {ours: [], peer: []}
    for i in range(1 + rounds * (1 if path.endswith(".gguf") else 3)):
        for side in (ours, peer):
            probed = _probe(side, path, threads)
            if i == 0:  # the file may not be in memory yet, nor what is imported be compiled
                continue
            found[side].append(probed)
            if not quiet:
                print(f"{title}: {side} {probed['read']:.3f} s", file=sys.stderr)
    medians = {
        f"{side}_{field}": statistics.median(one[field] for one in runs)
        for side, runs in (("ours", found[ours]), ("peer", found[peer]))
        for field in ("ready", "read", "peak", "size")
    }
    return {"what": title, "peer": peer, **medians}


def _probe(what: str, path: str, threads: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-P", "-c", PROBE, what, path, str(threads)], capture_output=True, text=True)
    if done.returncode:
        raise WorkError(
            f"{what} cannot load {path}: {(done.stderr.splitlines() or ['no reason given'])[-1][:300]}", code="failed"
        )
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("", "ready", "read", "peer", "its ready", "its read", "ready, share", "read, share", "peak", "its peak")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        ours, peer = ({field: row[f"{side}_{field}"] for field in ("ready", "read", "peak", "size")}
                      for side in ("ours", "peer"))  # fmt: skip
        cells = [
            row["what"], f"{ours['ready']:.3f} s", f"{ours['read']:.3f} s",
            row["peer"], f"{peer['ready']:.3f} s", f"{peer['read']:.3f} s",
            f"{ours['ready'] / peer['ready']:.2f}", f"{ours['read'] / peer['read']:.2f}",
            f"{ours['peak'] / ours['size']:.2f}", f"{peer['peak'] / peer['size']:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
