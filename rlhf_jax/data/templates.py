"""Render chat templates in a process, within limits of time, text and memory.

The process answers over its standard streams, in lines of JSON. The first line is the template, its
day, and the seconds per conversation. A later object holds further arguments of the template; a
list is a conversation, whose answer is [text, error or null]. The process imports only jinja2, so
that it starts fast.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from rlhf_jax.runtime.foreign import one_line

SECONDS = 10.0  # for a conversation
MOST_CHARACTERS = 4_000_000  # of a rendered conversation
MEMORY = 1 << 30  # bytes of address space
# The argument that makes `{% generation %}` visible, by two characters for private use.
MARKED = "marks_generation"
ANSWER_MARKS = ("\ue0fe", "\ue0ff")
# What templates ask for by name without asking first whether it is there.
NOT_GIVEN = {"tools": None, "documents": None}


def serve() -> None:
    """Render conversations until the standard input ends.

    A conversation that takes too long ends the process by SIGALRM, whatever it is doing: the kernel
    sends it even if the parent is gone.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    source, day, seconds = json.loads(sys.stdin.buffer.readline())
    now = datetime.datetime.fromisoformat(day)
    template = None
    arguments = {}
    for line in sys.stdin.buffer:
        messages = json.loads(line.decode())
        if isinstance(messages, dict):
            arguments = messages
            continue
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            template = template or compile_template(source, now)
            answer = render(template, messages, arguments), ""
        except Exception as error:  # of whatever the template computes
            answer = "", one_line(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def compile_template(source: str, now: datetime.datetime) -> jinja2.Template:
    """Compile a template in the same environment as transformers, within its time limit.

    It is sandboxed, trims blocks and has loop controls.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment.from_string(source)


def render(
    template: jinja2.Template, messages: Sequence[dict[str, Any]], arguments: dict[str, Any]
) -> str:
    """Render messages by a template; ValueError if the text becomes too long."""
    pieces = []
    left = MOST_CHARACTERS
    for piece in template.generate({**NOT_GIVEN, **arguments, "messages": messages}):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"it writes over {MOST_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


class _Generation(jinja2.ext.Extension):
    """Render `{% generation %}`, the mark of the assistant's text, as what it holds.

    With the argument MARKED, the text stands between the two characters of ANSWER_MARKS.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.If(
                nodes.Name(MARKED, "load"),
                [nodes.Output([nodes.TemplateData(mark)])],
                [],
                [],
                lineno=line,
            )
            for mark in ANSWER_MARKS
        )
        return [begin, *body, end]


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write a value as JSON, without escaping HTML as jinja2's own filter would."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    serve()
