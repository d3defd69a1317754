"""A llama in plain JAX with optax, whose whole training step is one jitted function: a side of `benchmarks small`.

The process builds the model of its arguments (layers, width, heads, ffn width, vocabulary, batch, context), takes a
step for every line of standard input, and prints its seconds. It needs jax and optax only.
"""

import sys
import time

import jax
import jax.numpy as jnp
import optax

layers, width, heads, ffn, vocab, batch, context = map(int, sys.argv[1:8])
head = width // heads


def drawn(key, *shape):
    return 0.02 * jax.random.normal(key, shape)


def weights(key):
    keys = iter(jax.random.split(key, 7 * layers + 2))
    return {
        "embedding": drawn(next(keys), vocab, width),
        "head": drawn(next(keys), width, vocab),
        "norm": jnp.ones(width),
        "layers": [
            {
                "norm1": jnp.ones(width), "norm2": jnp.ones(width),
                **{name: drawn(next(keys), width, width) for name in "qkvo"},
                "gate": drawn(next(keys), width, ffn), "up": drawn(next(keys), width, ffn),
                "down": drawn(next(keys), ffn, width),
            }
            for _ in range(layers)
        ],
    }  # fmt: skip


def normed(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def turned(x):
    angles = jnp.arange(context)[:, None] / 10_000 ** (jnp.arange(0, head, 2) / head)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def loss(model, inputs, targets):
    x = model["embedding"][inputs]
    for layer in model["layers"]:
        y = normed(x, layer["norm1"])
        q, k, v = ((y @ layer[name]).reshape(batch, context, heads, head) for name in "qkv")
        mixed = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + mixed.reshape(batch, context, width) @ layer["o"]
        y = normed(x, layer["norm2"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logits = normed(x, model["norm"]) @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1))


@jax.jit
def step(model, state, inputs, targets):
    value, gradients = jax.value_and_grad(loss)(model, inputs, targets)
    updates, state = optimizer.update(gradients, state, model)
    return optax.apply_updates(model, updates), state, value


model = weights(jax.random.key(0))
state = optimizer.init(model)
tokens = jax.random.randint(jax.random.key(1), (batch, context + 1), 0, vocab)
inputs, targets = tokens[:, :-1], tokens[:, 1:]
for _ in sys.stdin:
    began = time.perf_counter()
    model, state, value = step(model, state, inputs, targets)
    float(value)
    print(time.perf_counter() - began, flush=True)
