"""Model families by Hugging Face ``model_type``. A new family is one file of names and sizes, and one entry here."""

from realhf.arch.families.base import Family, HfTensor
from realhf.arch.families.gemma import GEMMA
from realhf.arch.families.gemma2 import GEMMA2
from realhf.arch.families.gpt2 import GPT2
from realhf.arch.families.gpt_neox import GPT_NEOX
from realhf.arch.families.llama import LLAMA
from realhf.arch.families.mistral import MISTRAL
from realhf.arch.families.mixtral import MIXTRAL
from realhf.arch.families.olmo2 import OLMO2
from realhf.arch.families.qwen2 import QWEN2
from realhf.arch.families.qwen3 import QWEN3
from realhf.arch.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA2, GPT2, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMO2)
}

__all__ = ["FAMILIES", "Family", "HfTensor"]
