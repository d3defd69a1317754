"""Models of this package as classes of `transformers`: `AutoModelForCausalLM`, `generate`, `Trainer`, `pipeline`.

>>> import glassformer.conversion.transformers
>>> AutoModelForCausalLM.from_pretrained(folder)                    # a folder that gf.save wrote
>>> GlassformerForCausalLM.of(gf.preset("llama@10m+alibi").build())   # any model, wrapped unchanged

`AutoModelForCausalLM` loads a decoder, with a prefix or without, `AutoModelForMaskedLM` a bidirectional model,
`AutoModelForSeq2SeqLM` one with two towers, `AutoModelForSequenceClassification` one with classes; `AutoModel` gives
the hidden states of any model. Weights are named `model.<our name>`, as in the folder. Needs the extra `hf`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

from glassformer.config import ModelConfig
from glassformer.conversion.wrapped import Wrapped, check_tokens, count, mean_loss, padding, placed
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.core import auxiliary
from glassformer.parts.forward_pass import Memory
from glassformer.parts.loss import IGNORED
from glassformer.parts.state import ModelState
from glassformer.register.config import GlassformerConfig

__all__ = [
    "GlassformerCache", "GlassformerConfig", "GlassformerForCausalLM", "GlassformerForMaskedLM",
    "GlassformerForSeq2SeqLM", "GlassformerForSequenceClassification", "GlassformerModel",
]  # fmt: skip


class GlassformerCache(Cache):
    """Decode state of a wrapped model: all tokens read so far, (b, t), and a `ModelState` of them.

    Memory for `max_len` tokens is allocated at the first ones. If the state cannot follow (it is full, a window has
    dropped tokens to return to, rows are repeated), a new state reads the tokens again. With `prompted` the tokens of
    the first call are the prefix of a model that takes one.
    """

    def __init__(self, max_len: int = 256, prompted: bool = False):
        super().__init__(layers=[])
        self.max_len, self.prompted = max_len, prompted
        self.prompt = 0
        """Number of tokens of the first call."""
        self.state: ModelState | None = None
        self.tokens: Tensor | None = None
        self.mask: Tensor | None = None
        """Mask of the tokens read, (b, t), 0 for padding; None without padding."""

    def read(self, model: Model, tokens: Tensor, mask: Tensor | None = None, memory: Memory | None = None) -> Tensor:
        """Returns `model.hidden_states` of the next tokens (b, s); `mask` (b, t) covers all tokens. The `memory` of a
        model that reads one comes with every call, because a new state reads it again."""
        start = self.get_seq_length()
        end = start + tokens.shape[1]
        if mask is None and self.mask is not None:
            mask = F.pad(self.mask, (0, tokens.shape[1]), value=1)
        elif mask is not None and self.mask is None:
            self.state = None  # it has read the past without this padding
        self.prompt = self.prompt if start else tokens.shape[1]
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.mask = mask
        if self.state is None or end > self.state.max_len:
            length = 0 if memory is None else memory.x.shape[1]
            self.state = model.init_state(tokens.shape[0], self._room(model, end), memory_len=length)
        read = self.state.length
        documents, positions = (None, None) if mask is None else (mask[:, read:], count(mask)[:, read:])
        again = None if read else memory
        return model.hidden_states(
            self.tokens[:, read:], self.state, positions, documents, again, global_tokens=self._prefix(model, read)
        )[:, start - read :]

    def _prefix(self, model: Model, read: int) -> Tensor | None:
        """Returns the mask of prompt tokens (b, t), True for the prefix, for a new state; None if the state has `read`
        tokens, and for a model without a prefix."""
        if read or not (self.prompted and model.takes_prefix):
            return None
        assert self.tokens is not None
        return (torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.prompt).expand_as(self.tokens)

    def _room(self, model: Model, needed: int) -> int:
        limit = model.embedding.limit
        room = self.max_len if needed <= self.max_len else max(needed, 2 * self.max_len)
        self.max_len = max(needed, min(room, limit or room))
        return self.max_len

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no limit: it grows

    @property
    def batch_size(self) -> int:
        return -1 if self.tokens is None else self.tokens.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row i of the batch by row beam_idx[i], as beam search needs."""
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
        """Drops the last -`tokens_to_remove` tokens. Raises RequestError for a positive number."""
        if tokens_to_remove > 0:
            raise RequestError(
                f"crop({tokens_to_remove}): give a negative number, of tokens to be forgotten",
                code="range", field="tokens_to_remove", value=tokens_to_remove,
            )  # fmt: skip
        if self.tokens is None or tokens_to_remove == 0:
            return
        self.tokens = self.tokens[:, :tokens_to_remove]
        self.mask = None if self.mask is None else self.mask[:, :tokens_to_remove]
        try:
            if self.state is not None:
                self.state.truncate(self.tokens.shape[1])
        except ValueError:  # a window has dropped the tokens
            self.state = None

    def reset(self) -> None:
        self.state = self.tokens = self.mask = None


class GlassformerForCausalLM(Wrapped, GenerationMixin):
    """A decoder for `AutoModelForCausalLM`."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        refuse(config.encoder is not None, "reads a source", "AutoModelForSeq2SeqLM")
        refuse(not config.head.predicts_tokens, "gives no logits of tokens", "AutoModel")

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
        """Returns logits (b, s, v) of tokens (b, s); with `labels` (b, s), which are shifted here, also the mean loss
        in nats, with the parts' auxiliary losses. With `num_items_in_batch`, both are scaled to the share of this piece
        in its batch.

        `attention_mask` (b, s), or (b, t) with a cache, is 0 for padding, on either side; positions count its ones.
        Without a cache `position_ids` may override them; without a mask, a restart of positions starts another
        document.
        """
        tokens, mask = check_tokens(input_ids, attention_mask, inputs_embeds), padding(attention_mask)
        if past_key_values is None and use_cache:
            past_key_values = GlassformerCache()
        with self.looked_at(output_hidden_states, output_attentions) as seen, auxiliary.gathering() as added:
            if past_key_values is None:
                x = self.model.hidden_states(tokens, **placed(tokens, mask, position_ids))
            else:
                x = self._continue(past_key_values, tokens, mask, position_ids)
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

    def _continue(
        self,
        cache: Any,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        memory: Memory | None = None,
    ) -> Tensor:
        if not isinstance(cache, GlassformerCache):
            raise RequestError(
                f"past_key_values is a {type(cache).__name__}; this model continues a GlassformerCache",
                code="type", field="past_key_values",
            )  # fmt: skip
        start = cache.get_seq_length()
        end = start + tokens.shape[1]
        if mask is not None and mask.shape[1] != end:
            raise RequestError(
                f"attention_mask has {mask.shape[1]} columns; with {start} tokens in the cache and {tokens.shape[1]} "
                f"new ones, it must have {end}",
                code="conflict", field="attention_mask", value=mask.shape[1],
            )  # fmt: skip
        counted = torch.arange(start, end, device=tokens.device)
        if mask is None and positions is not None and bool((positions != counted).any()):
            raise RequestError(
                "position_ids must count on from the tokens in the cache; leave them out",
                code="conflict", field="position_ids",
            )  # fmt: skip
        return cache.read(self.model, tokens, mask, memory)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> None:
        """Puts a cache for all tokens that `generate` may read into `model_kwargs`. Raises RequestError for a
        bidirectional model."""
        if not self.model.writes:
            raise RequestError(
                "this model is bidirectional (not causal), so it cannot generate", code="causal", field="model"
            )
        if self.model.takes_prefix and generation_config.use_cache is False:
            raise RequestError(
                "use_cache=False: this model reads the prompt as its prefix, which a cache remembers; leave it out",
                code="conflict", field="use_cache", value=False, expected="True",
            )  # fmt: skip
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = GlassformerCache(generation_config.max_length, prompted=True)


class GlassformerModel(Wrapped):
    """A model of any kind without logits, for `AutoModel`: hidden states, of the decoder if there are two towers, and
    the pooled vector if the head makes one."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """Returns last_hidden_state (b, s, d) and pooler_output (b, d), None without a pooling head. A model of images
        reads `pixel_values` (b, c, h, w)."""
        mask, given = padding(attention_mask), {}
        if self.model.encoder is not None:
            given = {"source": check_tokens(input_ids, attention_mask), "source_documents": mask}
            input_ids, mask = decoder_input_ids, padding(decoder_attention_mask)
        tokens = pixel_values if pixel_values is not None else check_tokens(input_ids, mask)
        where = {} if pixel_values is not None else placed(tokens, mask, position_ids)
        with self.looked_at(output_hidden_states, output_attentions) as seen:
            x = self.model.hidden_states(tokens, **where, **given, segments=token_type_ids)
        pooled = self.model.unembed(x, mask) if self.model.head.pool and self.model.head.vector else None
        out = BaseModelOutputWithPooling(x, pooled, **seen)
        return out.to_tuple() if return_dict is False else out


class _WithoutDecoder(Wrapped):
    """Base of encoders with a head: forward returns logits and their loss."""

    answer: Any

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns logits (b, s, v) or (b, c); with `labels` (b, s) or (b,), -100 ignored, the mean loss in nats.

        `attention_mask` (b, s) is 0 for padding; `token_type_ids` are segments; a model of images reads `pixel_values`
        (b, c, h, w) instead of tokens."""
        mask = padding(attention_mask)
        tokens = pixel_values if pixel_values is not None else check_tokens(input_ids, attention_mask)
        where = {} if pixel_values is not None else placed(tokens, mask, position_ids)
        with self.looked_at(output_hidden_states, output_attentions) as seen, auxiliary.gathering() as added:
            x = self.model.hidden_states(tokens, **where, segments=token_type_ids)
            logits = self.model.logits(self.model.unembed(x, mask))
        loss = None if labels is None else mean_loss(logits, labels, added, num_items_in_batch)
        out = self.answer(loss, logits, **seen)
        return out.to_tuple() if return_dict is False else out


class GlassformerForMaskedLM(_WithoutDecoder):
    """A bidirectional model that predicts tokens, for `AutoModelForMaskedLM`."""

    answer = MaskedLMOutput

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        refuse(config.encoder is not None, "reads a source", "AutoModelForSeq2SeqLM")
        refuse(config.causal, "sees no later tokens", "AutoModelForCausalLM")
        refuse(not config.head.predicts_tokens, "gives no logits of tokens", "AutoModel")


class GlassformerForSequenceClassification(_WithoutDecoder):
    """A model that returns logits of classes (b, c) for each text or image."""

    answer = SequenceClassifierOutput

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        refuse(not config.head.classes, "has no classes", "AutoModel")


class _Encoder(nn.Module):
    """The encoder of `model` as a module that `generate` calls once; `model` is not registered as its child."""

    main_input_name = "input_ids"

    def __init__(self, model: Model):
        super().__init__()
        self.whole = [model]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> BaseModelOutput:  # fmt: skip
        return BaseModelOutput(self.whole[0].encode(input_ids, padding(attention_mask)).x)


class GlassformerForSeq2SeqLM(GlassformerForCausalLM):
    """A model of two towers: the encoder reads `input_ids`, the decoder predicts each next token of
    `decoder_input_ids`."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        refuse(config.encoder is None, "has no encoder", "AutoModelForCausalLM or AutoModelForMaskedLM")

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return _Encoder(self.model)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: GlassformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput | tuple:
        """Returns logits (b, s, v) of decoder_input_ids (b, s), which attend to input_ids (b, t) or to given encoder
        outputs; with `labels` (b, s) also their mean loss in nats. Without decoder_input_ids, the labels shifted by one
        are used."""
        mask = padding(attention_mask)
        if encoder_outputs is None:
            memory = self.model.encode(check_tokens(input_ids, attention_mask), mask)
        else:
            memory = Memory(encoder_outputs[0], mask)
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.behind_the_first(labels)
        tokens, own = check_tokens(decoder_input_ids, decoder_attention_mask), padding(decoder_attention_mask)
        if past_key_values is None and use_cache:
            past_key_values = GlassformerCache()
        with self.looked_at(output_hidden_states, output_attentions) as seen, auxiliary.gathering() as added:
            if past_key_values is None:
                x = self.model.hidden_states(tokens, **placed(tokens, own, None), memory=memory)
            else:
                x = self._continue(past_key_values, tokens, own, None, memory)
            logits = self.model.logits(self.model.unembed(x))
        loss = None if labels is None else mean_loss(logits, labels, added, num_items_in_batch)
        looked = {f"decoder_{name}": value for name, value in seen.items()}
        cache: Any = past_key_values
        out = Seq2SeqLMOutput(loss, logits, cache, encoder_last_hidden_state=memory.x, **looked)
        return out.to_tuple() if return_dict is False else out

    def behind_the_first(self, labels: Tensor) -> Tensor:
        """Returns the decoder's input for labels (b, s): the start token, and all labels but the last."""
        first = self.generation_config.decoder_start_token_id
        if first is None:
            raise RequestError(
                "decoder_start_token_id: generation_config does not name the token that starts a text",
                code="missing", field="decoder_start_token_id",
            )  # fmt: skip
        return F.pad(labels[:, :-1], (1, 0), value=first).masked_fill(F.pad(labels[:, :-1] == IGNORED, (1, 0)), 0)

    prepare_decoder_input_ids_from_labels = behind_the_first


def refuse(condition: bool, why: str, right: str) -> None:
    """Raises RequestError if `condition` holds: "this model `why`; load it with `right`", another Auto class."""
    if condition:
        raise RequestError(f"this model {why}; load it with {right}", code="conflict", field="head", expected=right)


transformers.AutoConfig.register(GlassformerConfig.model_type, GlassformerConfig, exist_ok=True)
for _auto, _model in {
    transformers.AutoModel: GlassformerModel,
    transformers.AutoModelForCausalLM: GlassformerForCausalLM,
    transformers.AutoModelForMaskedLM: GlassformerForMaskedLM,
    transformers.AutoModelForSeq2SeqLM: GlassformerForSeq2SeqLM,
    transformers.AutoModelForSequenceClassification: GlassformerForSequenceClassification,
    transformers.AutoModelForImageClassification: GlassformerForSequenceClassification,
}.items():
    _auto.register(GlassformerConfig, _model, exist_ok=True)
