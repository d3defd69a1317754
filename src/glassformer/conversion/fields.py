"""An untrusted config: every value is checked for type and bounds before use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from glassformer.config import MAX_LAYERS
from glassformer.errors import Code, RequestError, shown

LARGEST = 1 << 40
"""Largest whole number of a config, which no published model comes near"""
T = TypeVar("T")
_REQUIRED: Any = object()

HARMLESS = {
    **dict.fromkeys(
        ("architectures", "model_type", "auto_map", "transformers_version", "_name_or_path", "name_or_path",
         "tokenizer_class", "unsloth_version", "unsloth_fixed", "task_specific_params", "cross_attention_hidden_size"),
        "names a class, a version, a file or a task",
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "is read with the weights"),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        "says which token has a role in a text; families whose positions depend on one read it",
    ),
    **dict.fromkeys(
        ("initializer_range", "initializer_factor", "init_std", "initializer_cutoff_factor"),
        "sets weights before training",
    ),
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "attention_hidden_dropout",
         "dropout", "resid_dropout", "residual_dropout", "embedding_dropout", "activation_dropout", "layerdrop",
         "resid_prob", "emb_prob", "emb_pdrop", "classifier_dropout"),
        "drops values in training only",
    ),
    **dict.fromkeys(
        ("use_cache", "gradient_checkpointing", "chunk_size_feed_forward", "cache_implementation", "pretraining_tp",
         "_attn_implementation_autoset", "attn_implementation", "use_flash_attention", "flash_attn", "torchscript"),
        "says how the same numbers are computed",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "return_dict"), "says what a call of transformers returns"
    ),
    **dict.fromkeys(("id2label", "label2id", "problem_type"), "names the classes of a head, or its loss"),
    **dict.fromkeys(
        ("is_decoder", "add_cross_attention", "tie_encoder_decoder"),
        "repeats what a decoder or an encoder-decoder is; encoders read it",
    ),
}  # fmt: skip
"""Fields of configs of every family that change no logit -> reason."""


class Fields:
    """Fields of an untrusted config.json, checked when they are read; null counts as absent. Errors name the file
    `where` and the path `inside` it."""

    def __init__(self, values: Any, where: str = "config.json", inside: str = ""):
        if not isinstance(values, Mapping):
            raise RequestError(
                f"{where} is a mapping of fields, and this is {type(values).__name__}",
                code="type", field=inside or "config",
            )  # fmt: skip
        self.values, self.where, self.inside = values, where, inside
        self.seen: set[str] = set()
        self.inner: dict[str, Fields] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise RequestError(f"{self.where} has no {name}", code="missing", field=f"{self.inside}{name}")
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.refuse(name, value, what, "type")
        return value

    def whole(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns the positive integer in the field `name`, `default` if it is absent. Raises RequestError, also for an
        absent field without a default."""
        value = self._typed(name, default, (int,), "expected a positive whole number")
        if value is not None and value < 1:
            raise self.refuse(name, value, "expected a positive whole number", "range")
        if value is not None and value > LARGEST:
            raise self.refuse(name, value, f"expected at most {LARGEST:,}", "range")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._typed(name, default, (int, float), "expected a number")
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._typed(name, default, (bool,), "expected true or false"))

    def layers(self, name: str) -> int:
        if (value := self.whole(name)) > MAX_LAYERS:
            raise self.refuse(name, value, f"at most {MAX_LAYERS} layers are allowed", "range")
        return value

    def one_of(self, name: str, table: Mapping[str, T], default: str) -> T:
        """Returns the entry of `table` under the field's value, or under `default` if the field is absent. Raises
        RequestError for an unknown value."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in table:
            raise self.refuse(name, value, f"known are {', '.join(table)}", "unknown")
        return table[value]

    def names(self, name: str, known: tuple[str, ...], length: int) -> list[str] | None:
        """Returns the field's list of `length` words, each one of `known`; None if the field is absent. Raises
        RequestError."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(item in known for item in value):
            raise self.refuse(name, value, f"expected a list of {length} out of {', '.join(known)}", "unknown")
        return value

    def mapping(self, name: str) -> Fields:
        """Returns the fields of the mapping in the field `name`, empty if it is absent; `unread` covers them too."""
        if name not in self.inner:
            self.inner[name] = Fields(self.get(name, {}), f"{self.where}: {name}", f"{self.inside}{name}.")
        return self.inner[name]

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """Returns a copy with some values replaced; fields that are read in the copy count as read in the original."""
        made = Fields({**self.values, **values}, self.where, self.inside)
        made.seen = self.seen
        return made

    def only(self, name: str, *allowed: Any) -> None:
        """Raises RequestError unless the field's value is one of `allowed`; an absent field counts as the first of
        them."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise self.refuse(name, value, f"only {' or '.join(map(repr, allowed))} can be computed")

    def ignore(self, *names: str) -> None:
        """Marks these fields as read, because they change no logit."""
        self.seen.update(names)

    def refuse(self, name: str, value: Any, right: str, code: Code = "unsupported") -> RequestError:
        return RequestError(
            f"{self.where}: {shown(name)}={str(value)[:80]!r}: {right}",
            code=code, field=f"{self.inside}{shown(name)}", value=value,
        )  # fmt: skip

    def unread(self) -> list[str]:
        """Returns the names of fields that were not read and may matter, sorted; nested ones with a dotted path."""
        mine = [shown(name) for name in self.values if name not in self.seen and name not in HARMLESS]
        return sorted(mine + [f"{name}.{one}" for name, said in self.inner.items() for one in said.unread()])
