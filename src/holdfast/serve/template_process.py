"""The program that renders a chat template: it reads JSON lines and answers each with a JSON line.

A chat template is a Jinja program out of a file of unknown origin. It runs in Jinja's immutable sandbox, in a process of its own
with limited memory and CPU time; the server ends the process when a rendering takes too long. The first line is the template.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 10
MAX_TEXT = 4 << 20


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    template: Any = None
    for line in sys.stdin:
        used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, resource.RLIM_INFINITY))
        try:
            template = template or environment().from_string(setup["template"])
            text = template.render(**setup["variables"], **json.loads(line))
            answer = {"text": text} if len(text) <= MAX_TEXT else {"error": "it writes a text that is too long"}
        except Exception as error:  # a template can raise anything, such as ZeroDivisionError
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may use, as transformers defines it."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        keep_trailing_newline=False,
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


class GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's text for training: renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
