"""``realhf completion``: prints a script that completes command lines in a shell, with words from the option data."""

import json
from collections.abc import Sequence
from pathlib import Path

from realhf.api.config.option import leaves
from realhf.apps.main import COMMANDS
from realhf.apps.prepare.option_help import completions, paths
from realhf.base.errors import UserError, did_you_mean
from realhf.base.paths import RunDir
from realhf.experiments import EXPERIMENTS, experiment_class

BASH = r"""_realhf() {
    local text=${COMP_LINE:0:COMP_POINT} line word i
    read -ra line <<< "$text"
    [[ $text == *[[:space:]] ]] && line+=("")
    word=${line[${#line[@]}-1]}
    mapfile -t COMPREPLY < <("${line[0]}" completion words "${line[@]:1}" 2> /dev/null)
    for i in "${!COMPREPLY[@]}"; do  # bash replaces the part of the word after the last = or :
        printf -v "COMPREPLY[i]" %q "${COMPREPLY[i]#"${word%"$2"}"}"
        [[ ${COMPREPLY[i]} == *[=./] ]] || COMPREPLY[i]+=" "
    done
}
complete -o nospace -F _realhf realhf"""
ZSH = r"""#compdef realhf
_realhf() {
    local -a found=("${(@f)$("${words[1]}" completion words "${(@)words[2,CURRENT-1]}" "$PREFIX" 2> /dev/null)}")
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
compdef _realhf realhf"""
FISH = r"""function __realhf_words
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    $words[1] completion words $words[2..-1] "$word" 2> /dev/null
end
complete -c realhf -f -a '(__realhf_words)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
FLAGS = {"quickstart": ("--config", "--dry-run"),
         "plan": ("--config", "--out", "--save", "--compare", "--sweep", "--goal", "--why"),
         "report": ("--out",), "demo": ("--dir",)}  # fmt: skip


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["words"]:
        print("".join(f"{word}\n" for word in candidates(arguments[1:])), end="")
    elif len(arguments) == 1 and arguments[0] in SCRIPTS:
        print(SCRIPTS[arguments[0]])
    else:
        hint = did_you_mean(arguments[0], SCRIPTS) if arguments else ""
        raise UserError(f"completion needs one shell: bash, zsh or fish{hint}; for example in ~/.bashrc: "
                        'eval "$(realhf completion bash)"')  # fmt: skip


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of the words after ``realhf``."""
    *before, word = words or [""]
    if not before:
        found: Sequence[str] = [*COMMANDS, "--help", "--version"]
    elif word.startswith("-"):
        found = [*FLAGS.get(before[0], ()), "--help", "--traceback"]
    elif before[-1] in ("--config", "--out", "--dir"):
        return paths(word)
    else:
        found = _arguments(before, word)
    return [text for text in dict.fromkeys(found) if text.startswith(word)]


def _arguments(before: Sequence[str], word: str) -> Sequence[str]:
    """Return the completions of an argument of a command."""
    command, is_first = before[0], len(before) == 1
    if command in ("resume", "report", "stop", "master") and is_first:
        return paths(word)
    if command in ("quickstart", "plan") and is_first:
        return [*EXPERIMENTS, *paths(word)]
    fixed = {"completion": tuple(SCRIPTS), "verifier": ("serve",), "help": tuple(COMMANDS)}
    if is_first and command in fixed:
        return fixed[command]
    options = _options(before)
    return completions(word, {key: field for key, field, _ in leaves(options())}) if options else ()


def _options(before: Sequence[str]) -> type | None:
    """Return the class of the options that the command reads; None if it has none or they are unknown."""
    match before:
        case ["quickstart" | "plan", name, *_]:
            return _class_of(name)
        case ["resume", folder, *_]:
            return _class_of(_experiment_in(RunDir(Path(folder))))
        case ["verifier", "serve", *_]:
            from realhf.apps.commands.verifier import ServeOptions

            return ServeOptions
        case ["profile", *_]:
            from realhf.apps.commands.profile import ProfileOptions

            return ProfileOptions
    return None


def _class_of(name: str) -> type | None:
    return experiment_class(name) if name in EXPERIMENTS else None  # a file of the user is not run for a completion


def _experiment_in(run: RunDir) -> str:
    try:
        return json.loads((run.stages if run.stages.is_file() else run.plan).read_text())["experiment"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
