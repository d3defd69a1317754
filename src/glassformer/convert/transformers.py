"""Models of our own family as `transformers` has them: `AutoModelForCausalLM`, `generate`, `Trainer`, `pipeline`.

>>> import glassformer.convert.transformers
>>> AutoModelForCausalLM.from_pretrained(folder)                    # a folder that gf.save wrote
>>> GlassformerForCausalLM.of(gf.preset("llama@10m+alibi").build())   # any model, wrapped as it stands

Weights are named `model.<our name>`, as in the folder. Needs the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.introspection import sites
from glassformer.model import Model
from glassformer.parts import auxiliary
from glassformer.parts.loss import IGNORED
from glassformer.register.config import GlassformerConfig
from glassformer.state import ModelState

__all__ = ["GlassformerCache", "GlassformerConfig", "GlassformerForCausalLM"]


class GlassformerCache(Cache):
    """Decode state of a wrapped model: the tokens read, (b, t), and our `ModelState` that remembers them.

    Room for `max_len` tokens is taken when the first arrive. Where the state cannot follow (it is full, a window has
    forgotten what it is to go back to, rows are repeated), a new one reads the tokens again.
    """

    def __init__(self, max_len: int = 256):
        super().__init__(layers=[])
        self.max_len = max_len
        self.state: ModelState | None = None
        self.tokens: Tensor | None = None
        self.mask: Tensor | None = None
        """(b, t), 0 for padding; None without any."""

    def read(self, model: Model, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `model.hidden_states` returns for the next tokens (b, s); `mask` (b, t) is that of all tokens."""
        start = self.get_seq_length()
        end = start + tokens.shape[1]
        if mask is None and self.mask is not None:
            mask = F.pad(self.mask, (0, tokens.shape[1]), value=1)
        elif mask is not None and self.mask is None:
            self.state = None  # which read the past as if nothing in it were padding
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.mask = mask
        if self.state is None or end > self.state.max_len:
            self.state = model.init_state(tokens.shape[0], self._room(model, end))
        read = self.state.length
        documents, positions = (None, None) if mask is None else (mask[:, read:], count(mask)[:, read:])
        return model.hidden_states(self.tokens[:, read:], self.state, positions, documents)[:, start - read :]

    def _room(self, model: Model, needed: int) -> int:
        limit = model.embedding.limit
        room = self.max_len if needed <= self.max_len else max(needed, 2 * self.max_len)
        self.max_len = max(needed, min(room, limit or room))
        return self.max_len

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # it grows

    @property
    def batch_size(self) -> int:
        return -1 if self.tokens is None else self.tokens.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self.tokens is None:
            return
        same_rows = len(beam_idx) == len(self.tokens)
        self.tokens = self.tokens[beam_idx]
        self.mask = None if self.mask is None else self.mask[beam_idx]
        if self.state is not None and same_rows:
            self.state.reorder(beam_idx)
        else:
            self.state = None

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tokens is not None:
            rows = torch.arange(len(self.tokens), device=self.tokens.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; `generate` gives their number as a negative one."""
        if tokens_to_remove > 0:
            raise RequestError(f"crop({tokens_to_remove}): give a negative number, of tokens to be forgotten")
        if self.tokens is None or tokens_to_remove == 0:
            return
        self.tokens = self.tokens[:, :tokens_to_remove]
        self.mask = None if self.mask is None else self.mask[:, :tokens_to_remove]
        try:
            if self.state is not None:
                self.state.truncate(self.tokens.shape[1])
        except ValueError:  # a window has forgotten
            self.state = None

    def reset(self) -> None:
        self.state = self.tokens = self.mask = None


def count(mask: Tensor) -> Tensor:
    """mask (b, t) of zeros and ones -> how many tokens stand before each, padding apart."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


class GlassformerForCausalLM(PreTrainedModel, GenerationMixin):
    """Our `Model`, as `self.model`, behind the interface of `transformers`.

    Every `kernel` and every mask is the model's own: `attn_implementation` chooses nothing.
    """

    config_class = GlassformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    accepts_loss_kwargs = True

    def __init__(self, config: GlassformerConfig):
        super().__init__(config)
        seed = int(torch.randint(1 << 31, (1,), device="cpu"))  # torch.manual_seed rules, as for every other model
        self.model = ModelConfig.from_dict(config.glassformer).build(seed)
        if not next(self.model.parameters()).is_meta:
            for module in self.model.modules():
                module._is_hf_initialized = True
        self.post_init()

    @classmethod
    def of(cls, model: Model) -> GlassformerForCausalLM:
        """Wraps a model as it stands: its weights are shared, not copied."""
        with torch.device("meta"):
            made = cls(GlassformerConfig(glassformer=model.config.to_dict()))
        made.model = model
        return made.train(model.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Asked for where a checkpoint lacks a weight."""
        lacking = [name for name, p in module.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        path = next(path for path, one in self.named_modules() if one is module)
        raise RequestError(f"the checkpoint has no tensor {path}.{lacking[0]}; give one that is whole")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GlassformerCache | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """logits (b, s, v) of tokens (b, s); with `labels` (b, s), which are shifted here, the mean loss in nats, whose
        gradient has the share of this piece of a batch in the losses of parts, as the loss itself.

        `attention_mask` (b, s), or (b, t) with a cache, is 0 for padding, on either side; positions count its ones.
        Without a cache `position_ids` may say otherwise, and where they begin anew without a mask another text begins.
        """
        if input_ids is None or inputs_embeds is not None:
            raise RequestError("inputs_embeds: this model reads tokens; give input_ids")
        for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            if value is not None and value.dim() != 2:
                raise RequestError(f"{name} has shape {tuple(value.shape)}; (batch, length) is right")
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.long()
        if past_key_values is None and use_cache:
            past_key_values = GlassformerCache()
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with watched(self.model, bool(hidden), bool(output_attentions)) as seen, auxiliary.gathering() as added:
            if past_key_values is None:
                x = self.model.hidden_states(input_ids, **placed(input_ids, mask, position_ids))
            else:
                x = self._continue(past_key_values, input_ids, mask, position_ids)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.logits(self.model.unembed(x[:, kept]))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
            share = 1.0 if num_items_in_batch is None else (labels[:, 1:] != IGNORED).sum() / num_items_in_batch
            loss = auxiliary.join(loss, [one * share for one in added])
        out = CausalLMOutputWithPast(loss, logits, past_key_values, **seen)
        return out.to_tuple() if return_dict is False else out

    def _continue(self, cache: Any, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        if not isinstance(cache, GlassformerCache):
            raise RequestError(f"past_key_values is a {type(cache).__name__}; this model continues a GlassformerCache")
        start = cache.get_seq_length()
        end = start + tokens.shape[1]
        if mask is not None and mask.shape[1] != end:
            raise RequestError(
                f"attention_mask has {mask.shape[1]} columns; with {start} tokens in the cache and {tokens.shape[1]} "
                f"new ones, {end} are right"
            )
        counted = torch.arange(start, end, device=tokens.device)
        if mask is None and positions is not None and bool((positions != counted).any()):
            raise RequestError("position_ids must count on from the tokens in the cache; leave them out")
        return cache.read(self.model, tokens, mask)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> None:
        """`generate` starts with room for all that it may write."""
        if not self.model.causal:
            raise RequestError("this model is bidirectional (not causal), so it cannot generate", code="not_causal")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = GlassformerCache(generation_config.max_length)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """The size of a vocabulary is part of the config. Raises RequestError for another one."""
        if new_num_tokens in (None, self.config.vocab_size):
            return self.model.embedding
        raise RequestError(
            f"new_num_tokens={new_num_tokens}: the vocabulary of this model has {self.config.vocab_size} tokens; build "
            f"one with vocab_size={new_num_tokens} and copy the rows that stay"
        )


def placed(tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
    """The positions and documents of tokens (b, s) that are a whole batch."""
    if mask is not None:
        return {"documents": mask, "positions": count(mask) if positions is None else positions.expand_as(tokens)}
    usual = torch.arange(tokens.shape[1], device=tokens.device)
    if positions is None or bool((positions == usual).all()):
        return {}
    positions = positions.expand_as(tokens)
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=False)
    return {"positions": positions} | ({"documents": begins.cumsum(-1)} if bool(begins.any()) else {})


@contextmanager
def watched(model: Model, hidden: bool, patterns: bool) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Fills {hidden_states: the stream before each layer, then the normalised last one; attentions: (b, n, s, t) of
    each layer} during one forward pass."""
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


AutoConfig.register(GlassformerConfig.model_type, GlassformerConfig, exist_ok=True)
AutoModelForCausalLM.register(GlassformerConfig, GlassformerForCausalLM, exist_ok=True)
