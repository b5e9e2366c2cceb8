"""Help on options: the most used ones by group, searches, suggestions for unknown names, and completions."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass
from enum import Enum
from fnmatch import fnmatch
from glob import escape, iglob
from typing import Any, get_args, get_origin

from realhf.api.config.option import Range, leaves
from realhf.base.errors import did_you_mean

BASIC = {
    "data": "dataset.path valid_path dataset.eval_fraction dataset.train_bs_n_seqs dataset.max_seqlen",
    "models": "model.path actor.path policy.path rew.path gold.path "
              "model.optimizer.lr actor.optimizer.lr critic.optimizer.lr",
    "algorithm": "reward.fn rw.type dpo.loss dpo.beta ppo.group_size ppo.kl_ctl ppo.ppo_n_minibatches vine.n_rollouts "
                 "n_rounds epochs judge",
    "sampling": "ppo.gen.max_new_tokens ppo.gen.temperature sampling.n sampling.max_new_tokens sampling.temperature",
    "run": "exp_ctrl.total_train_epochs exp_ctrl.total_train_steps exp_ctrl.save_freq_steps exp_ctrl.ckpt_freq_steps "
           "n_gpus_per_node allocation_mode seed experiment_name",
}  # fmt: skip
"""The most used options of all experiments by group; an experiment has at most twenty of them."""
SUPERSEDED = {
    "rew.path": {"reward.fn", "policy.path"},
    "dataset.max_seqlen": {"ppo.gen.max_new_tokens", "sampling.max_new_tokens"},
    "critic.optimizer.lr": {"ppo.disable_value"},
}
"""Options that are not among the most used of an experiment which has one of the others (and it is not False)."""

SYNONYMS = {
    "dataset.path": "data data_path train_file train_files dataset_name train_data",
    "dataset.max_prompt_len": "max_prompt_length",
    "dataset.train_bs_n_seqs": "batch_size train_batch_size global_batch_size per_device_train_batch_size bs",
    "ppo.gen.max_new_tokens": "max_length max_response_length max_completion_length max_tokens response_length",
    "sampling.max_new_tokens": "max_length max_response_length max_completion_length max_tokens response_length",
    "dataset.max_seqlen": "max_length max_seq_length max_seq_len seq_length cutoff_len block_size",
    "model.path": "model model_path model_name_or_path model_name pretrained base_model",
    "actor.path": "model model_path model_name_or_path model_name pretrained base_model policy",
    "rew.path": "reward_model reward_model_path",
    "optimizer.lr": "learning_rate",
    "optimizer.gradient_clipping": "max_grad_norm grad_clip clip_grad",
    "optimizer.warmup_steps_proportion": "warmup warmup_ratio warmup_steps",
    "reward.fn": "reward_fn reward_func reward_funcs reward_function",
    "ppo.group_size": "num_generations n_samples n_samples_per_prompt rollout_n group",
    "ppo.gen.keep_first": "over_sample_rate over_sampling oversampling",
    "sampling.n": "num_generations n_samples num_samples num_return_sequences",
    "ppo.kl_ctl": "kl_coef kl_coeff kl_loss_coef init_kl_coef kl_penalty",
    "ppo.eps_clip": "clip_range cliprange clip_ratio epsilon",
    "ppo.ppo_n_minibatches": "mini_batch_size num_mini_batches ppo_mini_batch_size ppo_epochs",
    "ppo.discount": "gamma",
    "ppo.gae_lambda": "lam lambda",
    "mb_spec.max_tokens_per_mb": "micro_batch_size gradient_accumulation_steps ppo_micro_batch_size",
    "exp_ctrl.total_train_epochs": "epochs num_epochs num_train_epochs total_epochs n_epochs max_epochs",
    "exp_ctrl.total_train_steps": "steps max_steps num_steps total_steps total_training_steps n_steps",
    "exp_ctrl.save_freq_steps": "save_steps save_freq save_interval",
    "exp_ctrl.eval_freq_steps": "eval_steps eval_freq eval_interval test_freq",
    "exp_ctrl.async_eval": "overlap_eval eval_async",
    "exp_ctrl.ckpt_freq_steps": "checkpoint_steps checkpoint_interval checkpointing_steps",
    "recover_mode": "resume_from_checkpoint resume_mode auto_resume",
    "n_gpus_per_node": "gpus num_gpus n_gpus nproc_per_node num_processes world_size num_workers n_workers",
    "n_nodes": "nodes nnodes num_nodes",
    "experiment_name": "run_name project_name name",
    "fileroot": "output_dir out_dir save_dir log_dir output_path default_local_dir",
}
"""Names that other libraries use, by the end of the option's name. The first entries are suggested first."""


@dataclass(frozen=True)
class OptionInfo:
    """One line of ``--help``."""

    key: str
    type: str
    default: str
    help: str
    range: str

    def line(self, width: int) -> str:
        valid = f", in {self.range}" if self.range else ""
        return f"  {self.key + ': ' + self.type:<{width}} {self.help}{valid} [{self.default}]"


def options_of(cls: type) -> Iterator[OptionInfo]:
    """Yield every option of a config class, in order of declaration, with the defaults of this class."""
    for key, field, default in leaves(cls()):
        shown = default.name if isinstance(default, Enum) else str(default)
        domain = field.metadata.get("domain")
        valid = str(domain) if isinstance(domain, Range) else ""
        yield OptionInfo(key, type_text(field.type), shown, field.metadata.get("help", ""), valid)


def options_help(cls: type, pattern: str = "all") -> str:
    """Return the lines on all options, on those that match a pattern, or without one (``""``) on the most used."""
    options = {option.key: option for option in options_of(cls)}
    groups = {"": list(options)}
    if not pattern:
        groups = basic_keys({key for key, option in options.items() if option.default != "False"})
    elif pattern != "all":
        groups = {"": matching(pattern, options.values())}
    shown = [options[key] for keys in groups.values() for key in keys]
    if not shown:
        return f"no option matches {pattern!r:.80}{did_you_mean(pattern, options)}"
    width = max(len(option.key) + len(option.type) for option in shown) + 3
    lines = [line for title, keys in groups.items() for line in (title, *(options[key].line(width) for key in keys))]
    return "\n".join(filter(None, lines))


def basic_keys(known: set[str]) -> dict[str, list[str]]:
    """Return the most used options that are known, by group."""
    groups = {
        title: [key for key in keys.split() if key in known and not SUPERSEDED.get(key, set()) & known]
        for title, keys in BASIC.items()
    }
    return {title: keys for title, keys in groups.items() if keys}


def matching(pattern: str, options: Iterable[OptionInfo]) -> list[str]:
    """Return the options with a part or a synonym that matches the glob, or all of whose words are in name and help."""
    options, word = list(options), pattern.partition("=")[0].lower()
    synonyms = synonyms_of(word, [option.key for option in options])
    words = word.replace("_", " ").replace("-", " ").split()
    return [
        option.key
        for option in options
        if fnmatch(option.key, f"*{word}*") or option.key in synonyms
        or (words and all(part in f"{option.key} {option.help}".lower() for part in words))
    ]  # fmt: skip


def synonyms_of(word: str, known: Iterable[str]) -> list[str]:
    """Return the known options that other libraries call ``word``, the best one first.

    Options in the group of the word come first (``critic.learning_rate``), then the most used ones.
    """
    group, _, name = word.lower().replace("-", "_").rpartition(".")
    ends = [end for end, names in SYNONYMS.items() if name in names.split()]
    found = [key for end in ends for key in known if f".{key}".endswith(f".{end}")]
    basic = " ".join(BASIC.values()).split()
    return sorted(found, key=lambda key: (not (group and key.startswith(f"{group}.")), key not in basic))


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``"  did you mean X ?"`` for an unknown option: the option of another library's name, else a close one."""
    known = list(known)
    return f"  did you mean {found[0]} ?" if (found := synonyms_of(word, known)) else did_you_mean(word, known)


def completions(word: str, known: Mapping[str, Field]) -> list[str]:
    """Return the next parts of names of options after ``word``, or the values after ``key=``."""
    key, is_value, value = word.partition("=")
    if not is_value:
        ends = {name: name.find(".", len(word)) for name in known if name.startswith(word)}
        return list(dict.fromkeys(f"{name}=" if end < 0 else name[: end + 1] for name, end in ends.items()))
    if key not in known:
        return []
    kind, domain = known[key].type, known[key].metadata.get("domain")
    values = ["True", "False"] if bool in (kind, *get_args(kind)) else choices(kind)
    if callable(domain):
        values = paths(value)
    return [f"{key}={text}" for text in values if text.startswith(value)]


def paths(start: str) -> list[str]:
    """Return the printable files and folders whose paths begin with ``start``; folders end with a slash."""
    found = filter(str.isprintable, iglob(f"{escape(start)}*"))
    return sorted(f"{path}/" if os.path.isdir(path) else path for path in found)


def choices(kind: Any) -> list[str]:
    """Return the valid words of an enumerated option, or of the items of a list."""
    if arguments := get_args(kind):
        return [word for argument in arguments for word in choices(argument)]
    return [choice.name for choice in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def type_text(kind: Any) -> str:
    if words := choices(kind):
        return f"list[{'|'.join(words)}]" if get_origin(kind) is list else "|".join(words)
    return (kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)).replace(" | None", "")
