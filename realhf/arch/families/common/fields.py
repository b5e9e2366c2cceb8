"""The fields of a ``config.json`` by allow-list: a field that nothing reads is refused. Readers check types."""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

_HARMLESS = {
    "origin and labels": (
        "model_type architectures _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype "
        "id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class "
        "custom_pipelines prefix unsloth_fixed unsloth_version unsloth_processed"
    ),
    "outputs and implementations of the same mathematics": (
        "return_dict output_attentions output_hidden_states output_router_logits torchscript use_cache use_bfloat16 "
        "_attn_implementation attn_implementation _attn_implementation_autoset experts_implementation pretraining_tp "
        "_flash_attn_2_enabled use_flash_attn use_flash_attention chunk_size_feed_forward gradient_checkpointing "
        "is_decoder max_sequence_length cache_implementation tf_legacy_loss"
    ),
    "dropout, which is not applied: responses and their log-probabilities come from the same network": (
        "attention_dropout hidden_dropout classifier_dropout attention_probs_dropout_prob hidden_dropout_prob"
    ),
    "sampling, which the options of a run determine": (
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
        "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id suppress_tokens "
        "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty begin_suppress_tokens "
        "decoder_start_token_id sep_token_id"
    ),
}
HARMLESS = frozenset(name for names in _HARMLESS.values() for name in names.split())
"""Fields without influence on log-probabilities and their gradients, for any family."""
FIXED = {
    "is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "use_mrope": False, "use_bidirectional_attention": False, "mlp_bias": False, "attention_bias": False,
}  # fmt: skip
"""The only supported value of fields that a family does not read itself."""


class HfFields(Mapping[str, Any]):
    """The fields of a ``config.json``; ``unread`` are those that no one has asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def unread(self) -> dict[str, Any]:
        return {k: v for k, v in self._fields.items() if k not in self._read}


def replaced(hf: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return the fields with other ``values``; only those that are read count as read."""
    return ChainMap(values, hf)  # type: ignore[arg-type]


def defaulted(hf: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return the fields with ``values`` for those that are absent."""
    return ChainMap(hf, values)  # type: ignore[arg-type]


def refuse_unread(fields: HfFields, unused: frozenset[str]) -> None:
    """Raise ValueError for any field except those that are read or harmless; ``unused`` are harmless in a family.

    An ignored field could change the mathematics, now or in a later version of transformers.
    """
    require(fields, **{key: only for key, only in FIXED.items() if key in fields.unread()})
    for key, value in fields.unread().items():
        if key not in HARMLESS and key not in unused and value not in (None, {}, []):
            raise ValueError(f"field '{key}' is {shown(value)}, which is not supported for this model_type: "
                             "remove it if the weights do not need it")  # fmt: skip


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def require(hf: Mapping[str, Any], **supported: Any) -> None:
    """Raise ValueError for fields with a value that is not supported; null stands for a supported False or 0."""
    for key, only in supported.items():
        value = hf.get(key, only)
        if value != only and not (value is None and not only):
            raise ValueError(f"field '{key}' is {shown(value)}, only {only!r} is supported")


def agreed(hf: Mapping[str, Any], *spellings: str, default: Any = None) -> Any:
    """Return the value of a field with several names, ``default`` if none is set; ValueError if they contradict."""
    found = {key: value for key in spellings if (value := hf.get(key)) is not None}
    for key, value in found.items():
        if value != next(iter(found.values())):
            raise ValueError(f"fields '{next(iter(found))}' and '{key}' contradict each other: "
                             f"{shown(next(iter(found.values())))} and {shown(value)}")  # fmt: skip
    return next(iter(found.values()), default)


def whole_number(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; an absent or null field gives ``default``, or ValueError if that is None."""
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise ValueError(f"field '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"field '{key}' must be a positive whole number, got {shown(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None, minimum: float | None = None) -> float:
    """Return a positive number or, with ``minimum``, a number that is at least that."""
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise ValueError(f"field '{key}' is missing")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (value <= 0 if minimum is None else value < minimum):
        kind = "a positive number" if minimum is None else f"a number of {minimum:g} or more"
        raise ValueError(f"field '{key}' must be {kind}, got {shown(value)}")
    return float(value)


def optional_number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number, ``default`` for an absent field, 0 for a null one (disabled)."""
    if key not in hf:
        return default
    return 0.0 if hf[key] is None else number(hf, key)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return true or false; null stands for false where that is the default."""
    value = hf.get(key, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"field '{key}' must be true or false, got {shown(value)}")
    return value


def token_ids(hf: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return one token or a list of tokens as a tuple, empty if the field is absent or null."""
    value = hf.get(key)
    found = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(token, bool) or not isinstance(token, int) for token in found):
        raise ValueError(f"field '{key}' must be a token or a list of tokens, got {shown(value)}")
    return found


def token_id(hf: Mapping[str, Any], key: str) -> int | None:
    found = token_ids(hf, key)
    if len(found) > 1:
        raise ValueError(f"field '{key}' must be one token, got {shown(hf[key])}")
    return found[0] if found else None
