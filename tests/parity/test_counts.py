"""Parameter counts against those of the published checkpoints, FLOPs against torch's counter."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from glassformer.architectures import PRESETS
from glassformer.naming import assign
from glassformer.parts.mixer import AttentionConfig
from tests.parity.published import UNCALLED

from .families import COMPOSED, PUBLISHED, TINY, published, shrink

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-1": 116_534_784,
    "gpt-3": 174_604_259_328,
    "starcoder": 15_517_456_384,
    "palm-8b": 8_632_012_800,
    "palm-540b": 540_356_474_880,
    "glam": 1_161_757_474_816,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-160m": 162_322_944,
    "mpt-7b": 6_649_286_656,
    "mamba-130m": 129_135_360,
    "mamba2-130m": 128_989_632,
    "jamba-v0.1": 51_570_323_328,
    "qwen3-next-80b": 79_674_391_296,
    "bert-base": 109_482_240,
    "bert-base-mlm": 109_514_298,
    "minilm-l6": 22_713_216,
    "roberta-base": 124_697_433,
    "distilbert-base": 66_985_530,
    "modernbert-base": 149_655_232,
    "longformer-base": 148_711_257,
    "bigbird-base": 128_111_286 - UNCALLED["bigbird-base"],
    "vit-base": 86_567_656,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "transformer-base": 63_045_632,
    "transformer-big": 214_171_648,
    "t5-small": 60_506_624,
    "flan-t5-small": 76_961_152,
    "switch-base": 619_339_008,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "opus-mt": 74_410_496 - 2 * 512 * 512,  # but for the sinusoids of both towers, which are not parameters here
}


def test_table_is_complete() -> None:
    assert set(PARAMETERS) == set(PRESETS)


def test_original_transformers_have_about_the_papers_size():
    """1706.03762, table 3: 65 and 213 million, of "about 37000 tokens"; without one table for all three, 20 % more."""
    for name, millions in {"transformer-base": 65, "transformer-big": 213}.items():
        config = PRESETS[name]()
        assert config.num_params() == pytest.approx(millions * 1e6, rel=0.035)
        assert config.replace(head=config.head.replace(tied=False)).num_params() > 1.15 * millions * 1e6


def test_models_without_published_weights_have_the_size_of_their_paper() -> None:
    """2005.14165, table D.1; 2204.02311, table 1; 2112.06905, table 4, in billions."""
    for name, billions in {"gpt-3": 174.6, "palm-8b": 8.63, "palm-540b": 540.35, "glam": 1162}.items():
        assert PRESETS[name]().num_params() == pytest.approx(billions * 1e9, rel=1e-3), name
    assert PRESETS["glam"]().active_params() == pytest.approx(96.6e9, rel=1e-3)


def test_models_without_a_family_count_as_transformers_does() -> None:
    """GPT (its head tied), StarCoder and switch-base-8, from their config.json."""
    with torch.device("meta"):
        theirs = _published_sizes()
    for name, model in theirs.items():
        model.tie_weights()
        assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name], name


def _published_sizes() -> dict[str, transformers.PreTrainedModel]:
    return {
        "gpt-1": transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig()),
        "starcoder": transformers.GPTBigCodeForCausalLM(
            transformers.GPTBigCodeConfig(
                vocab_size=49152, n_positions=8192, n_embd=6144, n_layer=40, n_head=48, n_inner=24576, multi_query=True
            )
        ),
        "switch-base": transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(d_ff=3072, num_sparse_encoder_layers=6, num_sparse_decoder_layers=6)
        ),
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_count(name: str) -> None:
    assert PRESETS[name]().num_params() == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name, count in PARAMETERS.items() if count < 2e9])
def test_built_count(name: str) -> None:
    with torch.device("meta"):
        model = PRESETS[name]().build()
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]


def test_active_parameters() -> None:
    """DeepSeek-V3: 37.6 thousand million of them, Mixtral 12.9, Qwen3-30B-A3B 3.35."""
    wanted = {"deepseek-v3": 37_552_282_624, "mixtral-8x7b": 12_879_925_248, "qwen3-30b-a3b": 3_353_032_704}
    assert {name: PRESETS[name]().active_params() for name in wanted} == wanted


@pytest.mark.parametrize("size", TINY, ids=str)
@pytest.mark.parametrize("name", [*PUBLISHED, *COMPOSED])
def test_tiny_count_without_embeddings(name: str, size) -> None:
    """Layers and the final norm, the N of scaling laws, against the built module."""
    config = shrink(published(name), size)
    with torch.device("meta"):
        model = config.build()
    inner = [*model.layers.parameters(), *(model.final_norm.parameters() if model.final_norm else ())]
    assert config.num_params(embeddings=False) == sum(weight.numel() for weight in inner)
    assert config.num_params() == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("batch", "t"), [(1, 16), (3, 11)])
@pytest.mark.parametrize("name", [*PUBLISHED, *COMPOSED])
def test_flops(name: str, batch: int, t: int) -> None:
    """Forward FLOPs of the definition, exactly: what config.flops says of a token, times the tokens."""
    config = shrink(published(name), TINY[1])
    if isinstance(next(config.layers()).mixer, AttentionConfig):  # torch counts no fused one on the CPU
        config = assign(config, "kernel", "naive")
    model, tokens = config.build(), torch.zeros(batch, t, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == config.flops(t) * batch * t


@pytest.mark.parametrize(("name", "t", "seen"), [("llama-7b", 40, 20.5), ("mistral-7b", 40, (15 + 35 * 5) / 40)])
def test_flops_of_visible_keys(name: str, t: int, seen: float) -> None:
    """`full=False` counts the keys a query sees: half under a causal mask, the window's under a window."""
    size = TINY[0]
    config = shrink(published(name), size)
    heads = size.layers * 4 * size.n * (size.d // size.n)  # multiply-adds of q k^T and of pattern v, per key
    assert config.flops(t) - config.flops(t, full=False) == pytest.approx(heads * (t - seen))
