"""A llama in MLX, whose training step is one compiled function: a side of `benchmarks small`.

The process builds the model of its arguments (layers, width, heads, ffn width, vocabulary, batch, context), takes a
step for every line of standard input, and prints its seconds. It needs mlx only.
"""

import sys
import time
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

layers, width, heads, ffn, vocab, batch, context = map(int, sys.argv[1:8])
head = width // heads


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)
        self.rope = nn.RoPE(head)

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (
            part(y).reshape(batch, context, heads, head).transpose(0, 2, 1, 3) for part in (self.q, self.k, self.v)
        )
        mixed = mx.fast.scaled_dot_product_attention(self.rope(q), self.rope(k), v, scale=head**-0.5, mask="causal")
        x = x + self.o(mixed.transpose(0, 2, 1, 3).reshape(batch, context, width))
        y = self.norm2(x)
        return x + self.down(nn.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = [Layer() for _ in range(layers)]
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


model = Llama()
optimizer = optim.AdamW(1e-3, betas=[0.9, 0.95], weight_decay=0.1)
tokens = mx.random.randint(0, vocab, (batch, context + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:]
gradients_of = nn.value_and_grad(model, lambda: nn.losses.cross_entropy(model(inputs), targets, reduction="mean"))
kept = [model.state, optimizer.state]


@partial(mx.compile, inputs=kept, outputs=kept)
def step():
    value, gradients = gradients_of()
    gradients, _ = optim.clip_grad_norm(gradients, 1.0)
    optimizer.update(model, gradients)
    return value


for _ in sys.stdin:
    began = time.perf_counter()
    value = step()
    mx.eval(value, kept)
    print(time.perf_counter() - began, flush=True)
