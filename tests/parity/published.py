"""The config.json of published models. A preset must equal the config that its family reads from the file
(tests/conversion/test_old_configs.py); the family is proven against the published class
(tests/conversion/test_parity.py)."""

from __future__ import annotations

from typing import Any

_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def _dense(
    kind: str, layers: int, d: int, hidden: int, heads: tuple[int, int], vocab: int, context: int, eps: float,
    theta: float, tied: bool, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": d, "intermediate_size": hidden,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab,
        "max_position_embeddings": context, "rms_norm_eps": eps, "rope_theta": theta, "tie_word_embeddings": tied,
        **more,
    }  # fmt: skip


def _llama32(layers: int, d: int, n: int) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    return _dense("llama", layers, d, 8192, (n, 8), 128256, 131072, 1e-5, 5e5, True, hidden_act="silu",
                  head_dim=d // n, rope_scaling=rope, attention_bias=False, mlp_bias=False)  # fmt: skip


def _qwen25(layers: int, d: int, hidden: int, heads: tuple[int, int], vocab: int, context: int, tied: bool) -> Any:
    return _dense("qwen2", layers, d, hidden, heads, vocab, context, 1e-6, 1e6, tied, hidden_act="silu",
                  use_sliding_window=False, sliding_window=context, max_window_layers=layers)  # fmt: skip


def _gemma2(layers: int, d: int, hidden: int, heads: tuple[int, int]) -> dict[str, Any]:
    return _dense("gemma2", layers, d, hidden, heads, 256000, 8192, 1e-6, 1e4, True, head_dim=256,
                  hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=256,
                  sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)  # fmt: skip


def _gemma3(layers: int, d: int, hidden: int) -> dict[str, Any]:
    return _dense("gemma3_text", layers, d, hidden, (4, 1), 262144, 32768, 1e-6, 1e6, True, head_dim=256,
                  hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=512,
                  rope_local_base_freq=10000, sliding_window_pattern=6, attention_bias=False)  # fmt: skip


def _deepseek(kind: str, share: float, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_scaling": {**_YARN, "mscale": share, "mscale_all_dim": share}, "tie_word_embeddings": False,
        "attention_bias": False, "moe_layer_freq": 1, **more,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}  # fmt: skip
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    return _dense("gpt_oss", layers, 2880, 2880, (64, 8), 201088, 131072, 1e-5, 150000, False, head_dim=64,
                  hidden_act="silu", sliding_window=128, layer_types=kinds, rope_scaling=rope, attention_bias=True,
                  num_local_experts=experts, num_experts_per_tok=4, experts_per_token=4, swiglu_limit=7.0,
                  initial_context_length=4096, router_aux_loss_coef=0.9, output_router_logits=False)  # fmt: skip


def _bert(cls: str, layers: int = 12, d: int = 768, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "bert", "architectures": [cls], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "gradient_checkpointing": False, "hidden_dropout_prob": 0.1, "hidden_size": d, "intermediate_size": 4 * d,
        "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12,
        "num_hidden_layers": layers, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
        "use_cache": True, "vocab_size": 30522, **more,
    }  # fmt: skip


def _t5(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "t5", "d_model": 512, "d_kv": 64, "vocab_size": 32128, "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32, "n_positions": 512, "dropout_rate": 0.1, "is_encoder_decoder": True,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "output_past": True, **more,
    }  # fmt: skip


def _bart(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    towers = {
        f"{tower}_{name}": value
        for tower in ("encoder", "decoder")
        for name, value in {"layers": layers, "ffn_dim": 4 * width, "attention_heads": heads, "layerdrop": 0.0}.items()
    }
    return {
        "model_type": "bart", "d_model": width, "vocab_size": 50265, "max_position_embeddings": 1024,
        "activation_function": "gelu", "scale_embedding": False, "is_encoder_decoder": True, "normalize_before": False,
        "normalize_embedding": True, "add_bias_logits": False, "add_final_layer_norm": False,
        "num_hidden_layers": layers, "decoder_start_token_id": 2, **towers, **more,
    }  # fmt: skip


UNCALLED = {"bigbird-base": (768 + 1) * 768}
"""Parameters of published classes that these never call, and that ours do not have: a pooler next to the head."""
CONFIGS: dict[str, dict[str, Any]] = {
    "bert-base": _bert("BertModel"),
    "bert-base-mlm": _bert("BertForMaskedLM"),
    "minilm-l6": _bert("BertModel", 6, 384),
    "roberta-base": _bert(
        "RobertaForMaskedLM", model_type="roberta", vocab_size=50265, max_position_embeddings=514, type_vocab_size=1,
        layer_norm_eps=1e-5, bos_token_id=0, pad_token_id=1, eos_token_id=2,
    ),
    "distilbert-base": {
        "model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "activation": "gelu", "dim": 768,
        "attention_dropout": 0.1, "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "n_heads": 12,
        "max_position_embeddings": 512, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1, "tie_weights_": True,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "vocab_size": 30522,
    },
    "modernbert-base": {
        "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "vocab_size": 50368,
        "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
        "max_position_embeddings": 8192, "hidden_activation": "gelu", "norm_eps": 1e-5, "norm_bias": False,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 128,
        "local_rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "decoder_bias": True,
        "classifier_bias": False, "classifier_activation": "gelu", "classifier_pooling": "mean",
        "sparse_prediction": False,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0, "classifier_dropout": 0.0,
        "deterministic_flash_attn": False, "layer_norm_eps": 1e-5, "position_embedding_type": "absolute",
        "reference_compile": True, "sparse_pred_ignore_index": -100, "tie_word_embeddings": True, "pad_token_id": 50283,
        "bos_token_id": 50281, "eos_token_id": 50282, "cls_token_id": 50281, "sep_token_id": 50282,
        "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "gradient_checkpointing": False,
    },
    "longformer-base": _bert(
        "LongformerForMaskedLM", model_type="longformer", vocab_size=50265, max_position_embeddings=4098,
        type_vocab_size=1, layer_norm_eps=1e-5, bos_token_id=0, pad_token_id=1, eos_token_id=2, sep_token_id=2,
        attention_mode="longformer", attention_window=[512] * 12, ignore_attention_mask=False,
    ),
    "bigbird-base": _bert(
        "BigBirdForMaskedLM", model_type="big_bird", vocab_size=50358, max_position_embeddings=4096,
        hidden_act="gelu_new", attention_type="block_sparse", block_size=64, num_random_blocks=3, use_bias=True,
        rescale_embeddings=False, bos_token_id=1, eos_token_id=2, sep_token_id=66,
    ),
    "vit-base": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "num_attention_heads": 12,
        "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
        "id2label": {str(i): f"LABEL_{i}" for i in range(1000)}, "label2id": {f"LABEL_{i}": i for i in range(1000)},
    },
    "llama-3.2-1b": _llama32(16, 2048, 32),
    "llama-3.2-3b": _llama32(28, 3072, 24),
    "smollm2-360m": _dense("llama", 32, 960, 2560, (15, 5), 49152, 8192, 1e-5, 1e5, True, hidden_act="silu"),
    "smollm2-1.7b": _dense("llama", 24, 2048, 8192, (32, 32), 49152, 8192, 1e-5, 130000, True, hidden_act="silu"),
    "mixtral-8x7b": _dense(
        "mixtral", 32, 4096, 14336, (32, 8), 32000, 32768, 1e-5, 1e6, False, hidden_act="silu", sliding_window=None,
        num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02,
    ),
    "qwen2.5-0.5b": _qwen25(24, 896, 4864, (14, 2), 151936, 32768, True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, (12, 2), 151936, 131072, True),
    "qwen2.5-7b": _qwen25(28, 3584, 18944, (28, 4), 152064, 131072, False),
    "qwen3-30b-a3b": _dense(
        "qwen3_moe", 48, 2048, 6144, (32, 4), 151936, 40960, 1e-6, 1e6, False, head_dim=128, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], use_sliding_window=False, sliding_window=None, attention_bias=False,
    ),
    "olmo-2-1b": _dense("olmo2", 16, 2048, 8192, (16, 16), 100352, 4096, 1e-6, 5e5, False, hidden_act="silu"),
    "olmo-2-7b": _dense("olmo2", 32, 4096, 11008, (32, 32), 100352, 4096, 1e-6, 5e5, False, hidden_act="silu"),
    "olmoe-1b-7b": _dense(
        "olmoe", 16, 2048, 1024, (16, 16), 50304, 4096, 1e-5, 10000.0, False, hidden_act="silu", clip_qkv=None,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, attention_bias=False,
    ),
    "gemma-2-2b": _gemma2(26, 2304, 9216, (8, 4)),
    "gemma-2-9b": _gemma2(42, 3584, 14336, (16, 8)),
    "gemma-3-270m": _gemma3(18, 640, 2048),
    "gemma-3-1b": _gemma3(26, 1152, 6912),
    "phi-3-mini": _dense(
        "phi3", 32, 3072, 8192, (32, 32), 32064, 4096, 1e-5, 1e4, False, hidden_act="silu", sliding_window=2047,
        original_max_position_embeddings=4096, rope_scaling=None, attention_bias=False, pad_token_id=32000,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2", 0.707, num_hidden_layers=27, hidden_size=2048, intermediate_size=10944, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, vocab_size=102400, first_k_dense_replace=1, n_routed_experts=64,
        num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, n_group=1, topk_group=1,
        topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3", 1.0, num_hidden_layers=61, hidden_size=7168, intermediate_size=18432, num_attention_heads=128,
        num_key_value_heads=128, q_lora_rank=1536, vocab_size=129280, first_k_dense_replace=3, n_routed_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, n_group=8, topk_group=4,
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
    ),
    "mamba2-130m": {
        "model_type": "mamba2", "num_hidden_layers": 24, "hidden_size": 768, "vocab_size": 50288, "state_size": 128,
        "head_dim": 64, "num_heads": 24, "n_groups": 1, "expand": 2, "conv_kernel": 4, "chunk_size": 256,
        "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
        "time_step_limit": [0.0, {"__float__": "Infinity"}], "tie_word_embeddings": True,
    },
    "jamba-v0.1": _dense(
        "jamba", 32, 4096, 14336, (32, 8), 65536, 262144, 1e-6, 1e4, False, hidden_act="silu", num_experts=16,
        num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256, mamba_conv_bias=True,
        mamba_proj_bias=False, router_aux_loss_coef=0.001,
    ),
    "qwen3-next-80b": _dense(
        "qwen3_next", 48, 2048, 5120, (16, 2), 151936, 262144, 1e-6, 1e7, False, hidden_act="silu", head_dim=256,
        partial_rotary_factor=0.25, full_attention_interval=4, linear_num_key_heads=16, linear_key_head_dim=128,
        linear_num_value_heads=32, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False, router_aux_loss_coef=0.001,
    ),
    "t5-small": _t5(num_layers=6, num_heads=8, d_ff=2048),
    "bart-base": _bart(6, 768, 12),
    "bart-large": _bart(12, 1024, 16),
    "opus-mt": _bart(
        6, 512, 8, model_type="marian", vocab_size=58101, max_position_embeddings=512, activation_function="swish",
        scale_embedding=True, normalize_embedding=False, static_position_embeddings=True,
        decoder_start_token_id=58100, pad_token_id=58100, bad_words_ids=[[58100]], num_beams=6, max_length=512,
    ),
}  # fmt: skip

NO_CLASS = {
    "transformer-base", "transformer-big", "flan-t5-small", "gpt-1", "gpt-3", "starcoder", "palm-8b", "palm-540b",
    "glam", "switch-base",
}  # fmt: skip
"""Presets that no class of `transformers` builds from a config: Marian's has biases in attention and another eps; T5's
ties every head, unless a file has a separate one; the others have no family here, and tests/parity/test_counts.py
holds their counts."""
