"""llama.cpp, ik_llama.cpp and OpenVINO GenAI generating from a GGUF file: sides of `benchmarks generate`.

The process gets a name of SIDES, the file and the number of threads, and answers the lines of its standard input. It
imports the package of its side only, so that another interpreter can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CONTEXT = 2048
"""Tokens that all streams of a side may have together."""


def answering(make: Callable[[], Any]) -> None:
    """Answers a line of JSON with another until the input ends; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    one = make()
    print(json.dumps(one.facts), file=answers, flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(one, method)(**arguments)), file=answers, flush=True)


def timed(stamps: list[float], tokens: list[int]) -> dict[str, Any]:
    """Returns the total seconds, the seconds to the first token and the tokens/s after it, of a text that started at
    stamps[0] and whose tokens came at stamps[1:]."""
    began, first, last = stamps[0], stamps[1], stamps[-1]
    return {"seconds": last - began, "first": first - began, "steps": (len(tokens) - 1) / (last - first),
            "tokens": tokens}  # fmt: skip


class LlamaCpp:
    """The server of `xllamacpp`, and a second one with a slot for each of several streams once they are asked for."""

    def __init__(self, file: str, threads: int):
        self.file, self.threads, self.facts = file, threads, dict[str, Any]()
        self.servers = {1: self._server(1)}

    def _server(self, slots: int) -> Any:
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.verbosity = self.file, CONTEXT, slots, True, -1
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = self.threads
        return xllamacpp.Server(p)

    def _complete(self, prompt: list[int], new: int, slots: int = 1) -> tuple[str, dict[str, float]]:
        said = self.servers[slots].handle_completions(
            {"prompt": prompt, "n_predict": new, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        )
        said = json.loads(said) if isinstance(said, str) else said
        times = said["timings"]
        if (times["prompt_n"], times["predicted_n"]) != (len(prompt), new):
            raise RuntimeError(f"llama.cpp read {times['prompt_n']} tokens and wrote {times['predicted_n']}")
        return said["choices"][0]["text"], times

    def decode(self, prompt: list[int], new: int) -> dict[str, Any]:
        began = time.perf_counter()
        text, times = self._complete(prompt, new)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "first": times["prompt_ms"] / 1000, "steps": times["predicted_per_second"],
                "text": text}  # fmt: skip

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": len(prompt) / self._complete(prompt, 1)[1]["prompt_per_second"]}

    def eight(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        slots = len(prompts)
        if slots not in self.servers:
            self.servers[slots] = self._server(slots)
        with ThreadPoolExecutor(slots) as pool:
            began = time.perf_counter()
            said = list(pool.map(lambda prompt: self._complete(prompt, new, slots), prompts))
            return {"seconds": time.perf_counter() - began, "texts": [text for text, _ in said]}


class IkLlama:
    """The C functions of `ik-llama-cpp-python`, with repacked weights (`-rtr`), and flash attention if that package
    allows it. The package's own loop copies each token's 49,152 logits in Python; here NumPy reads them in place."""

    def __init__(self, file: str, threads: int):
        from ik_llama_cpp import _ctypes_api as c
        from ik_llama_cpp.llama import _cpu_has_avx_vnni

        self.c, self.facts = c, dict[str, Any]()
        c.llama_backend_init()
        loading = c.llama_model_default_params()
        loading.use_mmap, loading.repack_tensors = False, True
        model = c.llama_model_load_from_file(file.encode(), loading)
        p = c.llama_context_default_params()
        p.n_ctx = p.n_batch = CONTEXT
        p.n_threads = p.n_threads_batch = threads
        p.n_seq_max, p.flash_attn = 8, _cpu_has_avx_vnni()
        self.context = c.llama_init_from_model(model, p)
        if not self.context:
            raise RuntimeError(f"ik_llama.cpp does not load {file}")
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def _step(self, texts: list[list[int]], start: int) -> list[int]:
        """Reads the next tokens of each text, from position `start` on; returns the most likely token after each."""
        from numpy.ctypeslib import as_array

        c, length = self.c, len(texts[0])
        batch = c.llama_batch_init(len(texts) * length, 0, 1)
        batch.n_tokens = len(texts) * length
        for stream, text in enumerate(texts):
            for i, token in enumerate(text):
                row = stream * length + i
                batch.token[row], batch.pos[row], batch.logits[row] = token, start + i, i == length - 1
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
        failed = c.llama_decode(self.context, batch)
        c.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        last = (c.llama_get_logits_ith(self.context, (stream + 1) * length - 1) for stream in range(len(texts)))
        return [int(as_array(logits, (self.vocabulary,)).argmax()) for logits in last]

    def _generate(self, prompts: list[list[int]], new: int) -> tuple[list[float], list[list[int]]]:
        """Returns the times of the start and of each step, and the tokens of each text."""
        self.c.llama_kv_cache_clear(self.context)
        stamps, tokens = [time.perf_counter()], [self._step(prompts, 0)]
        stamps.append(time.perf_counter())
        for position in range(len(prompts[0]), len(prompts[0]) + new - 1):
            tokens.append(self._step([[token] for token in tokens[-1]], position))
            stamps.append(time.perf_counter())
        return stamps, [list(text) for text in zip(*tokens, strict=True)]

    def decode(self, prompt: list[int], new: int) -> dict[str, Any]:
        stamps, (text,) = self._generate([prompt], new)
        return timed(stamps, text)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        (began, ended), _ = self._generate([prompt], 1)
        return {"seconds": ended - began}

    def eight(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        stamps, texts = self._generate(prompts, new)
        return {"seconds": stamps[-1] - stamps[0], "tokens": texts}


class OpenVino:
    """The pipeline of `openvino-genai`, without the cache of prompts, and with a whole prompt in one piece."""

    def __init__(self, file: str, threads: int):
        import openvino_genai as genai

        self.genai, self.facts = genai, dict[str, Any]()
        batches = genai.SchedulerConfig()
        batches.enable_prefix_caching, batches.max_num_batched_tokens = False, CONTEXT
        self.pipe = genai.LLMPipeline(file, "CPU", scheduler_config=batches, INFERENCE_NUM_THREADS=threads)

    def _generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        import numpy as np
        from openvino import Tensor

        asked = self.genai.GenerationConfig()
        asked.max_new_tokens, asked.ignore_eos, asked.do_sample = new, True, False
        ids = np.array(prompts, dtype=np.int64)
        inputs = self.genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        made = self.pipe.generate(inputs, asked)
        seconds, texts = time.perf_counter() - began, [list(map(int, text)) for text in made.tokens]
        if any(len(text) != new for text in texts):
            raise RuntimeError(f"OpenVINO wrote {[len(text) for text in texts]} tokens, not {new}")
        return {"seconds": seconds, "tokens": texts, "first": made.perf_metrics.get_ttft().mean / 1000}

    def decode(self, prompt: list[int], new: int) -> dict[str, Any]:
        made = self._generate([prompt], new)
        return timed([0.0, made["first"], made["seconds"]], made["tokens"][0])

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return self._generate([prompt], 1)

    def eight(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        return self._generate(prompts, new)


SIDES: dict[str, Callable[[str, int], Any]] = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlama, "OpenVINO": OpenVino}
"""First word of a side -> its class."""


if __name__ == "__main__":
    answering(lambda: SIDES[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
