"""The verb `completion`: shell scripts that complete verbs, flags, choices and file names.

They are made from the same dataclasses as the parser and the help. A script is static: pressing TAB starts no Python.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from holdfast.command_line.flags import Flag, flags_of, options_of, positional
from holdfast.command_line.results import print_result


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script that makes TAB complete verbs, flags, their values and file names.

    Print it again after an update of Holdfast.

    Examples:

      source <(holdfast completion bash)    # this shell; in ~/.bashrc: every shell
      source <(holdfast completion zsh)     # the same in ~/.zshrc, after compinit
      holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """

    shell: Literal["bash", "zsh", "fish"] = field(metadata=positional())
    """Shell to write the script for."""
    json: bool = False
    """Print shell and script as JSON."""


@dataclass(frozen=True)
class VerbCompletion:
    """What may follow a verb: option → (flag, help text), and the known values of its positional arguments."""

    verb: str
    summary: str
    flags: dict[str, tuple[Flag, str]]
    words: tuple[str, ...]


def completion(options: CompletionOptions) -> None:
    script = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[options.shell](completions())
    print_result({"shell": options.shell, "script": script}, script, options.json)


def completions() -> list[VerbCompletion]:
    from holdfast.cli import VERBS, load
    from holdfast.system.field_docs import field_docs

    options = {verb: options_of(load(target)) for verb, (target, _) in VERBS.items()}
    flags = {verb: flags_of(kind) for verb, kind in options.items()}
    docs = {verb: field_docs(kind) for verb, kind in options.items()}
    found = []
    for verb, (_, summary) in VERBS.items():
        # A launch verb accepts the flags of the verb that it runs.
        inner = [word for flag in flags[verb] if "remainder" in flag.metadata for word in _known_words(flag)]
        accepted = {
            flag.option: (flag, docs[name][flag.name]) for name in [*inner, verb] for flag in flags[name] if flag.named
        }
        positionals = [flag for name in [verb, *inner] for flag in flags[name] if not flag.named]
        words = tuple(word for flag in positionals for word in _known_words(flag))
        found.append(VerbCompletion(verb, summary, accepted, words))
    return found


def _known_words(flag: Flag) -> Iterable[str]:
    """The values of a positional argument, if they are known."""
    from holdfast.config_files import known_configs

    if "remainder" in flag.metadata:
        return flag.metavar.removesuffix(" ...").split("|")
    return known_configs() if flag.metavar == "CONFIG" else flag.choices


def _by_first_word(
    entries: list[VerbCompletion],
) -> tuple[dict[str, list[VerbCompletion]], dict[str, list[VerbCompletion]]]:
    """First word → the verbs that start with it: of all verbs, and of the verbs of two words."""
    first: dict[str, list[VerbCompletion]] = {}
    for entry in entries:
        first.setdefault(entry.verb.split()[0], []).append(entry)
    return first, {word: verbs for word, verbs in first.items() if verbs[0].verb != word}


def bash_script(entries: list[VerbCompletion]) -> str:
    first, groups = _by_first_word(entries)
    seconds = [
        f"    {word}) second='{' '.join(e.verb.split()[1] for e in verbs)}' ;;" for word, verbs in groups.items()
    ]
    values = [
        f"    '{entry.verb} {option}') choices='{' '.join(flag.choices)}' ;;"
        for entry in entries
        for option, (flag, _) in entry.flags.items()
        if flag.choices
    ]
    flags = [f"    '{e.verb}') flags='{' '.join(e.flags)} --help' words='{' '.join(e.words)}' ;;" for e in entries]
    return f"""# bash completion of holdfast
_holdfast() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
  local verb=${{COMP_WORDS[1]}} second='' choices='' flags='' words=''
  if [ "$previous" = = ]; then previous=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
  if [ "$word" = = ]; then word=''; fi
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(first)} help version' -- "$word"))
    return
  fi
  case $verb in
{chr(10).join(seconds)}
  esac
  if [ -n "$second" ]; then
    if [ "$COMP_CWORD" = 2 ]; then COMPREPLY=($(compgen -W "$second" -- "$word")); return; fi
    verb="$verb ${{COMP_WORDS[2]}}"
  fi
  case "$verb $previous" in
{chr(10).join(values)}
  esac
  case $verb in
{chr(10).join(flags)}
  esac
  if [ -n "$choices" ]; then
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    # Without a match, `-o default` completes file names.
    COMPREPLY=($([[ $previous == -* ]] || compgen -W "$words" -- "$word"))
    if [ "${{#COMPREPLY[@]}}" -gt 0 ]; then COMPREPLY+=($(compgen -f -- "$word")); fi
  fi
}}
complete -o default -F _holdfast holdfast
"""


def zsh_script(entries: list[VerbCompletion]) -> str:
    first, groups = _by_first_word(entries)
    top = [_zsh_pair(word, verbs[0].summary if word not in groups else "") for word, verbs in first.items()]
    seconds = [
        f"    {word}) second=({' '.join(_zsh_pair(e.verb.split()[1], e.summary) for e in verbs)}) ;;"
        for word, verbs in groups.items()
    ]
    cases = []
    for entry in entries:
        specs = [_zsh_flag(option, flag, doc) for option, (flag, doc) in entry.flags.items()]
        files = f"*:argument:{{ compadd -- {' '.join(entry.words)}; _files }}" if entry.words else "*:file:_files"
        cases.append(f"    '{entry.verb}') _arguments {' '.join(specs)} {_quoted(files)} ;;")
    return f"""#compdef holdfast
# zsh completion of holdfast
_holdfast() {{
  local -a verbs second
  verbs=({" ".join(top)} help version)
  if (( CURRENT == 2 )); then _describe verb verbs; return; fi
  local verb=$words[2]
  case $verb in
{chr(10).join(seconds)}
  esac
  if (( $#second )); then
    if (( CURRENT == 3 )); then _describe verb second; return; fi
    verb="$verb $words[3]"
    shift words
    (( CURRENT-- ))
  fi
  shift words
  (( CURRENT-- ))
  case $verb in
{chr(10).join(cases)}
  esac
}}
if [ "$funcstack[1]" = _holdfast ]; then _holdfast "$@"; else compdef _holdfast holdfast; fi
"""


def _zsh_pair(word: str, summary: str) -> str:
    return _quoted(f"{word}:{summary}")


def _zsh_flag(option: str, flag: Flag, doc: str) -> str:
    doc = _sentence(doc)
    for special in "[]:":
        doc = doc.replace(special, f"\\{special}")
    spec = f"{'*' if flag.multiple else ''}{option}[{doc}]"
    if flag.kind is not bool:
        action = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_path else " "
        spec += f":value:{action}"
    return _quoted(spec)


def fish_script(entries: list[VerbCompletion]) -> str:
    first, groups = _by_first_word(entries)
    lines = []
    for word, verbs in first.items():
        summary = f" -d {_quoted(verbs[0].summary)}" if word not in groups else ""
        lines.append(f"complete -c holdfast -n '__holdfast_at 1' -f -a {word}{summary}")
    for word, verbs in groups.items():
        for entry in verbs:
            there = f"__holdfast_at 2; and __holdfast_is {word}"
            lines.append(f"complete -c holdfast -n '{there}' -f -a {entry.verb.split()[1]} -d {_quoted(entry.summary)}")
    for entry in entries:
        start = f"complete -c holdfast -n '__holdfast_is {entry.verb}'"
        if entry.words:
            lines.append(f"{start} -a '{' '.join(entry.words)}'")
        lines += [
            f"{start} -l {option[2:]} -d {_quoted(_sentence(doc))}{_fish_value(flag)}"
            for option, (flag, doc) in entry.flags.items()
        ]
    return f"""# fish completion of holdfast
function __holdfast_at # this many words are complete
  test (count (commandline -opc)) = $argv[1]
end
function __holdfast_is # the line starts with this verb
  set -l given (commandline -opc)
  string match -q -- "holdfast $argv *" "holdfast $given[2..] "
end
{chr(10).join(lines)}
"""


def _fish_value(flag: Flag) -> str:
    if flag.kind is bool:
        return ""
    return f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r -F" if flag.takes_path else " -x"


def _sentence(doc: str) -> str:
    """The first sentence: completion menus have one line per flag."""
    return doc.split(". ")[0].removesuffix(".")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"
