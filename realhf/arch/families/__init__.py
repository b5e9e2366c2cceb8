"""Model families by Hugging Face ``model_type``. A new family is its names and sizes in a file, and one entry here."""

from realhf.arch.families.cohere import COHERE2
from realhf.arch.families.common.base import Family
from realhf.arch.families.deepseek import DEEPSEEK_V3, KIMI_K2
from realhf.arch.families.gemma import GEMMA, GEMMA2, GEMMA3
from realhf.arch.families.glm import GLM, GLM4, GLM4_MOE
from realhf.arch.families.gpt import GPT2, GPT_NEOX
from realhf.arch.families.gpt_oss import GPT_OSS
from realhf.arch.families.granite import GRANITE
from realhf.arch.families.llama import LLAMA
from realhf.arch.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from realhf.arch.families.olmo import OLMO2, OLMO3, OLMOE
from realhf.arch.families.phi import PHI3
from realhf.arch.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from realhf.arch.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from realhf.arch.families.seed import SEED_OSS
from realhf.arch.families.smollm import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL, MINISTRAL3, GEMMA, GEMMA2, GEMMA3, GPT2, GPT_NEOX, OLMO2, OLMO3,
        PHI3, GLM, GLM4, GRANITE, COHERE2, SMOLLM3, SEED_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, GPT_OSS,
        DEEPSEEK_V3, KIMI_K2, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
    )
}  # fmt: skip
