"""The sandbox in which chat templates run, with limits on their functions, their time and the size of their values.

A template is a stranger's program. Jinja's sandbox keeps it from the machine. This one also ends it. Every loop, call
and filter counts, and now and then checks the CPU time of its thread. Every operation that can make a large value of
small ones is bounded. So a render ends by itself in any thread.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 2**20
"""Most characters of a template's source."""

MAX_NODES = 8192
"""Most parts of a template, ten times those of the largest known. Compiling holds up all threads for 30 us per part."""

# Steps between checks of the clock: some tens of microseconds.
_STEPS = 256
# The largest width, count or exponent. Templates need no larger ones.
_MAX_NUMBER = 10**5
_MAX_BITS = 2**16
_LONG_NUMBER = re.compile(r"\d{6}")
_NESTED_WIDTH = re.compile(r":[^}]*\{|%[^a-zA-Z]*\*")
_WIDENING = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "truncate", "_to_json"]
)
_FORMATTING = frozenset(["format", "format_map"])


class TemplateLimitError(Exception):
    """A template took too long, or built too much."""


class _Budget(threading.local):
    """The steps, time and size left to the render that runs in this thread."""

    def __init__(self) -> None:
        self.steps = 0
        self.end = float("inf")
        self.seconds = float("inf")
        self.characters = MAX_SOURCE

    def start(self, seconds: float, characters: int) -> None:
        self.steps = 0
        self.end = time.thread_time() + seconds
        self.seconds = seconds
        self.characters = characters

    def step(self) -> None:
        self.steps += 1
        if self.steps % _STEPS == 0 and time.thread_time() > self.end:
            raise TemplateLimitError(f"it was stopped after {self.seconds:g} seconds")

    def check_size(self, size: int) -> None:
        if size > self.characters:
            raise TemplateLimitError(f"it makes more than {self.characters} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face templates rely on it: trimmed blocks, loop controls, `tojson`, `strftime_now`,
    `raise_exception` and the `generation` tag, which marks text for training and is plain text here.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self._budget = _Budget()
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(function)
        self.filters[_COUNTED] = self._counted
        self.filters[_CHECKED] = self._checked
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def render(
        self, template: jinja2.Template, variables: Mapping[str, Any], *, seconds: float, characters: int
    ) -> str:
        """The text that a template makes.

        Args:
            seconds: CPU time after which it is stopped.
            characters: most characters of its text, and of every value in it.

        Raises:
            TemplateLimitError: it exceeds one of them.
            Exception: any that a template can raise.
        """
        self._budget.start(seconds, characters)
        pieces, size = [], 0
        for piece in template.generate(variables):
            self._budget.step()
            size += len(piece)
            self._budget.check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"it has more than {MAX_SOURCE} characters", 1)
        template = super()._parse(source, name, filename)
        if sum(1 for _ in islice(template.find_all(nodes.Node), MAX_NODES + 1)) > MAX_NODES:
            raise jinja2.TemplateSyntaxError(f"it has more than {MAX_NODES} parts", 1)
        return _Counting().visit(template)  # type: ignore[no-any-return]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja's own parameter names, so that a template's keyword arguments may have any other name.
        budget = __self._budget
        budget.step()
        if isinstance(getattr(__obj, "__self__", None), str):
            args = __self._bounded_arguments(__obj.__name__, __obj.__self__, args, kwargs)
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        name, owner = value.__name__, value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._bounded_arguments(name, owner, args, kwargs)
            return wrapped(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > _MAX_NUMBER or _bits(left) * abs(right) > _MAX_BITS:
                raise TemplateLimitError("a power is too large")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    self._budget.check_size(len(value) * times)
            if _bits(left) + _bits(right) > _MAX_BITS:
                raise TemplateLimitError("a number is too large")
        elif operator == "%" and isinstance(left, str) and (_LONG_NUMBER.search(left) or _NESTED_WIDTH.search(left)):
            raise TemplateLimitError("a width in a format is too large")
        return self._checked(super().call_binop(context, operator, left, right))

    def _bounded_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("sync_").removeprefix("do_")
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)  # Jinja marks a filter's arguments by attributes
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._budget.step()
            if name == "join" and len(args) > first:
                separator = args[first + 1] if len(args) > first + 1 else kwargs.get("d", "")
                self._bounded_arguments(name, str(separator), (list(args[first]),), {})
            elif len(args) > first:
                self._bounded_arguments(name, args[first], args[first + 1 :], kwargs)
            return self._checked(function(*args, **kwargs))

        return bounded

    def _bounded_arguments(
        self, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a text's method, or of a filter, that can make large values of small ones."""
        if name in _WIDENING or (name in _FORMATTING and isinstance(owner, str) and _NESTED_WIDTH.search(owner)):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and value > _MAX_NUMBER:
                    raise TemplateLimitError("a width is too large")
        if name in _FORMATTING and isinstance(owner, str) and _LONG_NUMBER.search(owner):
            raise TemplateLimitError("a width in a format is too large")
        if name == "join" and args:
            values = list(args[0])
            self._budget.check_size(sum(len(value) + len(owner) for value in values if isinstance(value, str)))
            args = (values, *args[1:])
        if name == "replace" and len(args) > 1 and all(isinstance(value, str) for value in (owner, *args[:2])):
            self._budget.check_size((owner.count(args[0]) + 1) * len(args[1]))
        return args

    def _checked(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self._budget.check_size(len(value))
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._budget.step()
            yield value


# Names that a template cannot spell.
_COUNTED = "neper counted"
_CHECKED = "neper checked"


class _Counting(NodeTransformer):
    """Puts our filters into loops, and into joins of texts without an operator that can be intercepted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _CHECKED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _CHECKED)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson. Jinja's own escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
