"""Costs before a GPU is rented: parameters, memory and time of models that are never built."""

import glassformer as gf

config = gf.preset("qwen3-8b")
print(f"{config.num_params():,} parameters, {config.state_bytes(32_768) / 1e9:.1f} GB of cache for 32,768 tokens")

for change in ("", "+gqa:2", "+window:4096", "+mamba"):
    cost = gf.plan(f"llama-7b{change}", context=32_768)
    print(f"llama-7b{change:<13} state {cost.state_bytes / 1e9:6.2f} GB")

step = gf.plan("llama@124m", train=True, batch=8, context=1024, dtype="bfloat16")
print({name: f"{size / 1e9:.2f} GB" for name, size in step.memory.items() if size})
