"""A model taken apart: by the forward hooks of torch, and by `gf.capture`, which sees what no module returns."""

import torch

import glassformer as gf

model = gf.preset("llama@0.3m+vocab_size=100+context=64").build(seed=0).eval()
tokens = torch.randint(100, (1, 12))

outputs = {}
for name, module in model.named_modules():
    if name.endswith((".mixer", ".ffn")):
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
with torch.no_grad():
    model(tokens)

seen = gf.capture(model, tokens, ["layers.*.mixer.out", "layers.*.ffn.out", "layers.*.mixer.pattern"])
for name, output in outputs.items():
    print(name, tuple(output.shape), torch.equal(output, seen[f"{name}.out"]))
print("attention of layer 0, head 0, last token:", seen["layers.0.mixer.pattern"][0, 0, -1])
