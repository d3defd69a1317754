"""Base of the classes that put our models behind the interface of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.introspection import sites
from glassformer.model import Model
from glassformer.parts.core import auxiliary
from glassformer.parts.loss import IGNORED, cross_entropy
from glassformer.register.config import GlassformerConfig


class Wrapped(PreTrainedModel):
    """Our `Model`, in the attribute `model`, behind the interface of `transformers`.

    Kernels and masks are the model's: `attn_implementation` has no effect.
    """

    config_class = GlassformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    accepts_loss_kwargs = True

    def __init__(self, config: GlassformerConfig):
        super().__init__(config)
        described = ModelConfig.from_dict(config.glassformer)
        self.check(described)
        seed = int(torch.randint(1 << 31, (1,), device="cpu"))  # seeded by torch.manual_seed, as every other model
        self.model = described.build(seed)
        if not next(self.model.parameters()).is_meta:
            for module in self.model.modules():
                module._is_hf_initialized = True
        self.post_init()

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises RequestError if this class cannot wrap a model of `config`; accepts any by default."""

    @classmethod
    def of(cls, model: Model) -> Self:
        """Returns a wrapper of `model`; the weights are shared, not copied."""
        with torch.device("meta"):
            made = cls(GlassformerConfig(glassformer=model.config.to_dict()))
        made.model = model
        return made.train(model.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Raises RequestError with the name of a weight of `module` that the checkpoint lacks; `transformers` calls it
        then."""
        lacking = [name for name, p in module.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        path = next(path for path, one in self.named_modules() if one is module)
        raise RequestError(
            f"the checkpoint has no tensor {path}.{lacking[0]}; give one that is whole",
            code="missing", field=f"tensor {path}.{lacking[0]}",
        )  # fmt: skip

    @contextmanager
    def looked_at(self, hidden: bool | None, patterns: bool | None) -> Iterator[dict[str, tuple[Tensor, ...]]]:
        """Records, inside the block, hidden states and patterns as `watched` does; `hidden=None` means the config's
        output_hidden_states, `patterns=None` False."""
        hidden = self.config.output_hidden_states if hidden is None else hidden
        with watched(self.model, bool(hidden), bool(patterns)) as seen:
            yield seen

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Returns the embedding. Raises RequestError for another size, because the config fixes it."""
        if new_num_tokens in (None, self.config.vocab_size):
            return self.model.embedding
        raise RequestError(
            f"new_num_tokens={new_num_tokens}: the vocabulary of this model has {self.config.vocab_size} tokens; build "
            f"one with vocab_size={new_num_tokens} and copy the rows that stay",
            code="unsupported", field="new_num_tokens", value=new_num_tokens,
        )  # fmt: skip


def check_tokens(tokens: Tensor | None, mask: Tensor | None, embeds: object = None) -> Tensor:
    """Returns the tokens (b, s). Raises RequestError for embeddings instead of tokens, and for tokens or a mask without
    two dimensions."""
    if tokens is None or embeds is not None:
        raise RequestError(
            "inputs_embeds: this model reads tokens; give input_ids", code="unsupported", field="inputs_embeds"
        )
    for name, value in (("input_ids", tokens), ("attention_mask", mask)):
        if value is not None and value.dim() != 2:
            raise RequestError(
                f"{name} has shape {tuple(value.shape)}; expected (batch, length)",
                code="range", field=name, value=tuple(value.shape),
            )  # fmt: skip
    return tokens


def padding(mask: Tensor | None) -> Tensor | None:
    """Returns the attention mask as integers (b, t), 0 for padding; None if it hides no token."""
    return None if mask is None or bool(mask.all()) else mask.long()


def mean_loss(logits: Tensor, labels: Tensor, added: list[Tensor], count: Tensor | int | None) -> Tensor:
    """Returns the mean loss in nats of logits (b, ..., v) against labels (b, ...), -100 ignored, plus the auxiliary
    losses `added`. `count`: number of labels in the whole batch if this is a piece of one, otherwise None."""
    total = cross_entropy(logits, labels, "none" if count is not None else "mean")
    loss = total if count is None else total.sum() / count
    share = 1.0 if count is None else (labels != IGNORED).sum() / count
    return auxiliary.join(loss, [one * share for one in added])


def count(mask: Tensor) -> Tensor:
    """Returns the number of unpadded tokens before each position, (b, t), for a mask (b, t) of zeros and ones."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def placed(tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
    """Returns the arguments positions and documents, (b, s) each, of `Model.hidden_states` for a whole batch of tokens;
    {} if nothing is padded and positions are 0 to s-1."""
    if mask is not None:
        return {"documents": mask, "positions": count(mask) if positions is None else positions.expand_as(tokens)}
    usual = torch.arange(tokens.shape[1], device=tokens.device)
    if positions is None or bool((positions == usual).all()):
        return {}
    positions = positions.expand_as(tokens)
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=False)
    return {"positions": positions} | ({"documents": begins.cumsum(-1) + 1} if bool(begins.any()) else {})


@contextmanager
def watched(model: Model, hidden: bool, patterns: bool) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Yields a dict, filled when the block's forward pass is over: hidden_states, the stream (b, s, d) before each
    layer and after the final norm; attentions, (b, n, s, t) of each layer."""
    layers = range(len(model.layers))
    wanted: dict[str, list[str]] = {}
    if hidden:
        wanted["hidden_states"] = [*(f"layers.{i}.resid_pre" for i in layers), "final_norm"]
    if patterns:
        wanted["attentions"] = [f"layers.{i}.mixer.pattern" for i in layers]
    known, values = (sites(model) if wanted else {}), {}
    hooks = []
    for name in {name for names in wanted.values() for name in names} & known.keys():

        def keep(module: nn.Module, args: object, value: Tensor, name: str = name) -> None:
            values[name] = value

        hooks.append(known[name].register_forward_hook(keep))
    seen: dict[str, tuple[Tensor, ...]] = {}
    try:
        yield seen
        seen |= {key: tuple(values[name] for name in names if name in values) for key, names in wanted.items()}
    finally:
        for hook in hooks:
            hook.remove()
