"""The frozen parameters of a shard with quantized matrices, which are quantized when they are written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, ParamSpec, relative
from realhf.arch.lora import base_specs
from realhf.arch.quantization import INTEGER_BITS, column_box, fewer_columns, quantized_names
from realhf.models.flat_params import FlatParams
from realhf.models.quantized_matrix import QuantizedMatrix


class QuantizedParams(FlatParams):
    """The frozen parameters named in ``boxes``. ``data`` has those that are not quantized; reads dequantize."""

    def __init__(
        self, config: ModelConfig, boxes: Mapping[str, Box], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert config.lora is not None and config.lora.bits
        names, specs = quantized_names(config), base_specs(config)
        super().__init__(specs, {name: box for name, box in boxes.items() if name not in names}, dtype, device)
        self._bits, self._group_size = config.lora.bits, config.lora.group_size
        self._per_byte = INTEGER_BITS // self._bits
        self._specs = {spec.name: spec for spec in specs if spec.name in names and spec.name in boxes}
        self._quantized = {name: boxes[name] for name in self._specs}
        self._integers = self._columns(self._per_byte, torch.int8, device)
        self._scales = self._columns(self._group_size, dtype, device)

    def _columns(self, by: int, dtype: torch.dtype, device: torch.device | str) -> FlatParams:
        boxes = {name: column_box(box, by) for name, box in self._quantized.items()}
        return FlatParams([fewer_columns(spec, by) for spec in self._specs.values()], boxes, dtype, device)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in (self.data, self._integers.data, self._scales.data))

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, *self._quantized)

    def box(self, name: str) -> Box:
        return self._quantized[name] if name in self._quantized else super().box(name)

    def spec(self, name: str) -> ParamSpec:
        return self._specs[name] if name in self._quantized else super().spec(name)

    def is_quantized(self, name: str) -> bool:
        return name in self._quantized

    def matrix(self, *names: str) -> QuantizedMatrix:
        """Return a quantized matrix, or adjacent ones on top of each other."""
        return QuantizedMatrix(self._integers.view(*names), self._scales.view(*names), self._bits)

    def view(self, *names: str) -> Tensor:
        """Return parameters as ``FlatParams.view`` does, quantized ones as a dequantized copy."""
        return self.matrix(*names).dequantized() if names[0] in self._quantized else super().view(*names)

    def read(self, name: str, box: Box) -> Tensor:
        """Return ``box``, of a quantized matrix a dequantized copy."""
        if name not in self._quantized:
            return super().read(name, box)
        return self.view(name)[relative(box, self._quantized[name])]

    @torch.no_grad()
    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Copy ``tensor`` to ``box``; quantize it if the parameter is, which needs boxes of whole groups."""
        if name not in self._quantized:
            super().write(name, box, tensor)
            return
        try:
            new = QuantizedMatrix.of(tensor.to(self.data.device), self._bits, self._group_size, self.data.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self._integers.write(name, column_box(box, self._per_byte), new.integers)
        self._scales.write(name, column_box(box, self._group_size), new.scales)
