"""Model families by Hugging Face ``model_type``. A new family is its names and sizes in a file, and one entry here."""

from realhf.arch.families.base import Family
from realhf.arch.families.gemma import GEMMA, GEMMA2
from realhf.arch.families.gpt import GPT2, GPT_NEOX
from realhf.arch.families.llama import LLAMA, OLMO2
from realhf.arch.families.mistral import MISTRAL, MIXTRAL
from realhf.arch.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA2, GPT2, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMO2)
}
