"""The model families by their Hugging Face ``model_type``. To add one: a file of names and sizes, and a line here."""

from realhf.models.families.base import Family, HfTensor
from realhf.models.families.gpt2 import GPT2
from realhf.models.families.llama import LLAMA
from realhf.models.families.qwen2 import QWEN2

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, GPT2)}

__all__ = ["FAMILIES", "Family", "HfTensor"]
