"""Stored formats of quantized weights, read as floating-point tensors: FP8 with block scales, MXFP4, GPTQ and AWQ.

A folder names its format in ``quantization_config`` of ``config.json``. Readers return boxes of the tensors that a
folder without quantization would store, so that nothing else knows of the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
Slices = tuple[slice, ...]
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, by its four bits (OCP Microscaling formats, version 1.0, section 5.3.3)."""
MX_BLOCK = 32
"""Weights per scale of MXFP4; a scale is a power of two with a bias of 127."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of an integer, from the lowest."""


class Files(Protocol):
    """The tensors of a folder as they are stored."""

    @property
    def names(self) -> set[str]: ...

    def handle(self, name: str) -> Any:
        """Return a lazy handle, which has ``get_shape`` and reads when indexed."""


class StoredFormat(Protocol):
    """Tensors as they would be stored without quantization."""

    @property
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that ``names`` has."""

    def read(self, name: str, box: Slices) -> Tensor:
        """Return a box of a tensor, in floating point."""


def plain_values(files: Files, name: str, box: Slices) -> Tensor:
    """Return a box of a floating-point tensor; ValueError for another type."""
    handle = files.handle(name)
    if handle.get_dtype() not in FLOATS:
        raise ValueError(f"tensor '{name}' has the type {handle.get_dtype()}, supported are {', '.join(FLOATS)}: "
                         "dequantise the weights")  # fmt: skip
    values: Tensor = handle[box]
    return values


@dataclass(frozen=True)
class Plain:
    """Weights in floating point."""

    files: Files

    @property
    def names(self) -> set[str]:
        return self.files.names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files.handle(name).get_shape())

    def read(self, name: str, box: Slices) -> Tensor:
        return plain_values(self.files, name, box)


@dataclass(frozen=True)
class Fp8:
    """E4M3 weights ``W``, and ``W_scale_inv`` for blocks of rows and columns, or one scale without ``block``."""

    files: Files
    block: tuple[int, int] | None

    @property
    def names(self) -> set[str]:
        without = (".weight_scale_inv", ".activation_scale", ".input_scale")
        return {name for name in self.files.names if not name.endswith(without)}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files.handle(name).get_shape())

    def read(self, name: str, box: Slices) -> Tensor:
        if self.files.handle(name).get_dtype() != "F8_E4M3":
            return plain_values(self.files, name, box)
        values: Tensor = self.files.handle(name)[box]
        if f"{name}_scale_inv" not in self.files.names:
            raise ValueError(f"tensor '{name}' is in FP8 and has no '{name}_scale_inv'")
        scales = self.files.handle(f"{name}_scale_inv")
        if self.block is None:
            return values.float() * scales[...].float()
        expected = [-(-size // block) for size, block in zip(self.shape(name), self.block, strict=True)]
        if list(scales.get_shape()) != expected:
            raise ValueError(f"tensor '{name}_scale_inv' has shape {list(scales.get_shape())}, expected {expected} for "
                             f"blocks of {list(self.block)}")  # fmt: skip
        rows, columns = (
            torch.arange(span.start, span.stop) // size - span.start // size
            for span, size in zip(box, self.block, strict=True)
        )
        spans = (slice(s.start // size, -(-s.stop // size)) for s, size in zip(box, self.block, strict=True))
        return values.float() * scales[tuple(spans)].float()[rows][:, columns]


@dataclass(frozen=True)
class Mxfp4:
    """Experts ``X`` ``[E, in, out]``, stored as ``X_blocks`` ``[E, out, in / 32, 16]`` and ``X_scales``."""

    files: Files

    @property
    def names(self) -> set[str]:
        plain = {name for name in self.files.names if not name.endswith(("_blocks", "_scales"))}
        return plain | {name.removesuffix("_blocks") for name in self.files.names if name.endswith("_blocks")}

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.files.names:
            return tuple(self.files.handle(name).get_shape())
        count, outs, n_blocks, _ = self.files.handle(f"{name}_blocks").get_shape()
        return count, n_blocks * MX_BLOCK, outs

    def read(self, name: str, box: Slices) -> Tensor:
        if name in self.files.names:
            return plain_values(self.files, name, box)
        experts, ins, outs = box
        first, last = ins.start // MX_BLOCK, -(-ins.stop // MX_BLOCK)
        place = (experts, outs, slice(first, last))
        pairs = self.files.handle(f"{name}_blocks")[(*place, slice(0, MX_BLOCK // 2))]
        scales = self.files.handle(f"{name}_scales")[place]
        bits = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)  # the low four bits come first
        values = torch.tensor(FP4_VALUES)[bits.int()]
        values = (values * 2.0 ** (scales.float().unsqueeze(-1) - 127)).flatten(-2)
        start = ins.start - first * MX_BLOCK
        return values[..., start : start + ins.stop - ins.start].transpose(1, 2)


@dataclass(frozen=True)
class PackedIntegers:
    """GPTQ and AWQ: ``M.qweight``, ``M.qzeros`` and ``M.scales`` of every linear module M, read as ``M.weight``.

    GPTQ packs inputs, AWQ outputs. The first format of GPTQ has zero points minus one, ``shifted_zeros``. The one is
    subtracted from whole integers, as by gptqmodel, so a zero point of 0 borrows from the next one.
    """

    files: Files
    bits: int
    group_size: int
    is_awq: bool
    shifted_zeros: bool

    @property
    def names(self) -> set[str]:
        parts = (".qweight", ".qzeros", ".scales", ".g_idx")
        plain = {name for name in self.files.names if not name.endswith(parts)}
        return plain | {f"{name.removesuffix('.qweight')}.weight" for name in self._packed()}

    def _packed(self) -> set[str]:
        return {name for name in self.files.names if name.endswith(".qweight")}

    @property
    def _per_integer(self) -> int:
        return 32 // self.bits

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.files.names:
            return tuple(self.files.handle(name).get_shape())
        first, second = self.files.handle(f"{name.removesuffix('.weight')}.qweight").get_shape()
        return (second * self._per_integer, first) if self.is_awq else (second, first * self._per_integer)

    def read(self, name: str, box: Slices) -> Tensor:
        if name in self.files.names:
            return plain_values(self.files, name, box)
        module, (outs, ins) = name.removesuffix(".weight"), box
        handle = lambda part: self.files.handle(f"{module}.{part}")
        groups = self._groups(module, ins)
        one = sum(1 << place for place in range(0, 32, self.bits)) if self.shifted_zeros else 0
        zeros = self._unpacked_columns(handle("qzeros")[(slice(None), self._integers(outs))] + one, outs)
        if self.is_awq:
            values = self._unpacked_columns(handle("qweight")[(ins, self._integers(outs))], outs)
        else:
            packed = handle("qweight")[(self._integers(ins), outs)]
            values = _cut(self._bits(packed).movedim(-1, 1).flatten(0, 1), ins, self._per_integer)
        scales = handle("scales")[(slice(None), outs)].float()
        return (scales[groups] * (values - zeros[groups])).t()

    def _groups(self, module: str, ins: slice) -> Tensor:
        """Return the group of every input."""
        if f"{module}.g_idx" in self.files.names:
            found: Tensor = self.files.handle(f"{module}.g_idx")[ins].long()
            return found
        size = self.group_size if self.group_size > 0 else max(ins.stop, 1)
        return torch.arange(ins.start, ins.stop) // size

    def _integers(self, span: slice) -> slice:
        """Return the integers that store a span of values."""
        return slice(span.start // self._per_integer, -(-span.stop // self._per_integer))

    def _bits(self, packed: Tensor) -> Tensor:
        """Return the values of every integer, in a new last dimension."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        return (packed.unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)

    def _unpacked_columns(self, packed: Tensor, outs: slice) -> Tensor:
        """Return values that are packed along the last dimension, cut to ``outs``."""
        values = self._bits(packed)
        if self.is_awq:
            values = values[..., torch.tensor(AWQ_ORDER).argsort()]
        return _cut(values.flatten(-2).t(), outs, self._per_integer).t()


def _cut(values: Tensor, span: slice, per_integer: int) -> Tensor:
    """Cut the first dimension, which has whole integers, to a span."""
    start = span.start % per_integer
    return values[start : start + span.stop - span.start]


@dataclass(frozen=True)
class SplitExperts:
    """The experts of layers, stored as ``gate_up_proj`` ``[E, 2 * wide, D]`` and ``down_proj`` ``[E, D, wide]``.

    They are read as the matrices of each expert, which most folders of the same families store.
    """

    stored: StoredFormat

    @cached_property
    def _parts(self) -> dict[str, tuple[str, int, int, int]]:
        """The tensor of every matrix, its expert, its first row and its rows."""
        parts: dict[str, tuple[str, int, int, int]] = {}
        for name in self.stored.names:
            layer, _, kind = name.rpartition(".mlp.experts.")
            projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
            if layer and projections and len(shape := self.stored.shape(name)) == 3:
                rows = shape[1] // len(projections)
                for expert in range(shape[0]):
                    for number, projection in enumerate(projections):
                        own = f"{layer}.mlp.experts.{expert}.{projection}.weight"
                        parts[own] = name, expert, number * rows, rows
        return parts

    @property
    def names(self) -> set[str]:
        return self.stored.names - {name for name, *_ in self._parts.values()} | set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self.stored.shape(name)
        stacked, _, _, rows = self._parts[name]
        return rows, self.stored.shape(stacked)[2]

    def read(self, name: str, box: Slices) -> Tensor:
        if name not in self._parts:
            return self.stored.read(name, box)
        stacked, expert, first, _ = self._parts[name]
        rows, columns = box
        own = slice(first + rows.start, first + rows.stop)
        return self.stored.read(stacked, (slice(expert, expert + 1), own, columns))[0]


def stored_format(files: Files, options: Mapping[str, Any] | None) -> StoredFormat:
    """Return the reader of a folder with this ``quantization_config``, if any, which ``check_format`` accepts."""
    match (options or {}).get("quant_method"):
        case None:
            return Plain(files)
        case "fp8":
            block = (options or {}).get("weight_block_size")
            return Fp8(files, (int(block[0]), int(block[1])) if block else None)
        case "mxfp4":
            return Mxfp4(files)
    assert options is not None
    is_awq = options["quant_method"] == "awq"
    shifted_zeros = not is_awq and options.get("checkpoint_format") != "gptq_v2"
    return PackedIntegers(files, options["bits"], options.get("group_size", 128), is_awq, shifted_zeros)
