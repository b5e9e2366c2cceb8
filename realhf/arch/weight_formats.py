"""Formats of quantized weights in Hugging Face folders: which ``quantization_config`` is read into floating point."""

from collections.abc import Mapping
from typing import Any

from realhf.arch.families.common.fields import shown

HARMLESS = [
    "quant_method",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
    "ignored_layers",
    "activation_scheme",
    "desc_act",
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "model_name_or_path",
    "model_file_base_name",
    "meta",
    "dataset",
    "tokenizer",
    "exllama_config",
    "backend",
    "use_cuda_fp16",
    "max_input_length",
    "use_exllama",
    "cache_block_outputs",
    "batch_size",
    "sym",
    "quant_type",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "dequantize",
    "scale_fmt",
]
"""Fields that do not say what stored numbers mean; the tensors of a module show whether it is quantized."""
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn")},
    "mxfp4": {},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",), "lm_head": (False,),
             "is_marlin_format": (False,)},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
}  # fmt: skip
"""The supported values of fields, by format."""
SIZES = {"fp8": ("weight_block_size",), "mxfp4": (), "gptq": ("group_size",), "awq": ("group_size",)}
REQUIRED = {"gptq": ("bits",), "awq": ("bits",)}


def check_format(options: Any) -> None:
    """Raise ValueError for a ``quantization_config`` whose weights cannot be read."""
    field = f"field 'quantization_config' is {shown(options)}"
    method = options.get("quant_method") if isinstance(options, Mapping) else None
    if not isinstance(method, str) or method not in ONLY:
        raise ValueError(f"{field}: supported are the methods {', '.join(ONLY)}")
    for key in REQUIRED.get(method, ()):
        if key not in options:
            raise ValueError(f"{field}: '{key}' is missing")
    for key, value in options.items():
        if key in ONLY[method]:
            if value not in ONLY[method][key]:
                allowed = ", ".join(repr(one) for one in ONLY[method][key])
                raise ValueError(f"{field}: '{key}' is {shown(value)}, supported is {allowed}")
        elif key in SIZES[method]:
            _check_size(field, key, value)
        elif key not in HARMLESS and value not in (None, {}, [], False):
            raise ValueError(f"{field}: '{key}' is {shown(value)}, which is not supported")


def _check_size(field: str, key: str, value: Any) -> None:
    if key == "group_size":
        fits = isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == -1)
    else:
        is_pair = isinstance(value, list) and len(value) == 2
        fits = value is None or is_pair and all(type(size) is int and size > 0 for size in value)
    if not fits:
        raise ValueError(f"{field}: '{key}' is {shown(value)}")
