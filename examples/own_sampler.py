"""A custom sampler: a function of the logits and the tokens so far, here one that never repeats a pair."""

import argparse

import glassformer as gf


def no_repeated_pair(logits, tokens):
    follows = tokens[1:][tokens[:-1] == tokens[-1]]  # the tokens that have followed the last one before
    logits[follows] = -float("inf")
    return logits


run = gf.train("llama@0.3m", argparse.__file__, steps=10, batch_size=4, context=64)
llm = run.loaded
print("greedy:          ", repr(llm.generate("def ", max_new_tokens=12).text))
print("no repeated pair:", repr(llm.generate("def ", max_new_tokens=12, logits_processor=no_repeated_pair).text))
print(gf.generate(llm.model, [[1, 2, 3]], max_new_tokens=10, logits_processor=no_repeated_pair))
