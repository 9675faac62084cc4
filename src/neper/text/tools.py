"""Tool calls: the forms in which models write them, the form of a model, and a reader of calls in its text.

hermes       <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>, one after the other
llama3_json  {"name": "f", "parameters": {…}}; …, all at the beginning of the text or after <|python_tag|>
mistral      [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …], or each [TOOL_CALLS]f{…}, [TOOL_CALLS]f[ARGS]{…} or
             [TOOL_CALLS]f[CALL_ID]id[ARGS]{…}

In an object the arguments may also be a JSON string with the object in it, null, or absent. The backslashes of such a
string are in no field.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from neper.errors import StartupError
from neper.text.reader import Range, Reader, Reading
from neper.text.tokenizer import Tokenizer


class ToolFormat(NamedTuple):
    """A form of tool calls.

    Attributes:
        opening: the text before calls.
        bare: calls at the beginning of the content may come without it.
        tags: texts that may be tokens of their own, which are invisible if they are special.
    """

    name: str
    opening: str
    bare: bool
    tags: tuple[str, ...]


TOOL_FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", False, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFormat("llama3_json", "<|python_tag|>", True, ("<|python_tag|>",)),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", False, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}

PLAIN_FORM = TOOL_FORMATS["hermes"]
"""The form of calls where a template shows no tools, and words tell the model of them (plain_tools)."""

TOOL_CALL_PARSERS = (*TOOL_FORMATS, "none")
"""The names in a configuration."""

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
# The beginning of a string that holds an object: its white space may be escaped.
_HOLDS_OBJECT = re.compile(r"(?:[ \t\r\n]|\\[tnr])*\{")
_HOLDS_NOTHING = re.compile(r"[ \t\r\n]*")
# Templates that show these ask for calls that are not JSON.
_OTHER_FORMS = ("<function=", "<arg_key>")


def tool_format(tokenizer: Tokenizer, parser: str | None = None) -> ToolFormat | None:
    """The form of a model's calls, by the name of a parser, or read from its chat template; None where it has none.

    Raises:
        StartupError: no parser has that name, or the template shows no tools, so nothing asks for calls of that form.
    """
    if parser is not None and parser not in TOOL_CALL_PARSERS:
        raise StartupError(f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, got {parser!r}")
    source = tokenizer.chat_template_source
    if parser is not None:
        form = TOOL_FORMATS.get(parser)
        if form not in (None, PLAIN_FORM) and "tools" not in source:
            raise StartupError(
                f"tool_call_parser {parser!r} cannot be used: the model's chat template shows no tools. Without it, "
                f"the model is told of tools in words, and its calls are read as {PLAIN_FORM.name}"
            )
        return form if "tools" in source else None
    if "tools" not in source:
        return None
    if any(mark in source for mark in _OTHER_FORMS):
        return None
    for form in TOOL_FORMATS.values():
        if form.opening in source:
            return form
    # Templates of older Llama and Mistral models ask for calls without showing the token that begins them.
    for form in TOOL_FORMATS.values():
        if form.opening in tokenizer.added_tokens:
            return form
    return None


class MadeCall(NamedTuple):
    """A call that was made, besides its name and arguments.

    Attributes:
        id: the model's own id; None where it wrote none.
        empty: the model wrote no arguments, so no token spells them: they are `{}`.
    """

    id: str | None = None
    empty: bool = False


class CallReader:
    """Reads calls in a text. Their names and arguments belong to those fields, the text around them to none.

    A call begins once its name and the opening of its arguments are there. Text that never gets that far stays
    undecided.

    Args:
        single: nothing is read after the first call.

    Attributes:
        made: the calls so far.
        num_completed: the number of calls whose arguments are complete.
    """

    def __init__(self, reader: Reader, form: ToolFormat, *, single: bool) -> None:
        self.form = form
        self.made: list[MadeCall] = []
        self.num_completed = 0
        self._reader = reader
        self._single = single
        self._read = {"hermes": self._hermes, "llama3_json": self._llama, "mistral": self._mistral}[form.name]

    @property
    def finished(self) -> bool:
        """True when nothing more is read."""
        return self._single and self.num_completed > 0

    def read(self) -> Reading[None]:
        """Read the calls that begin here, if they are calls."""
        return self._read()

    def _hermes(self) -> Reading[None]:
        yield from self._reader.literal("<tool_call>")
        yield from self._reader.skip()
        if (yield from self._object()):
            yield from self._form("</tool_call>")

    def _llama(self) -> Reading[None]:
        tagged = yield from self._reader.literal("<|python_tag|>")
        yield from self._reader.skip()
        while (yield from self._object(tagged=tagged)) and (yield from self._form(";")):
            yield from self._reader.skip()
            self._reader.drop(self._reader.at)

    def _mistral(self) -> Reading[None]:
        reader = self._reader
        yield from reader.literal("[TOOL_CALLS]")
        yield from reader.skip()
        if (yield from reader.literal("[")):
            yield from reader.skip()
            while (yield from self._object()):
                if not (yield from self._form(",")):
                    yield from self._form("]")
                    return
                yield from reader.skip()
                reader.drop(reader.at)
            return
        start = reader.at
        yield from reader.skip(_NAME_CHARACTERS)
        name = Range(start, reader.at)
        call_id: str | None = None
        if (yield from reader.literal("[CALL_ID]")):
            start = reader.at
            yield from reader.skip(_NAME_CHARACTERS)
            call_id = reader.text(start, reader.at)
        yield from reader.literal("[ARGS]")
        yield from reader.skip()
        if self._is_name(name) and (yield from reader.peek()) == "{":
            yield from self._arguments(name, call_id)

    def _object(self, *, tagged: bool = True) -> Reading[bool]:
        """Read a call written as an object. False where it is not one; the text read so far then stays undecided.

        An object without arguments is a call only after a tag. Otherwise it may be any JSON with a name in it.
        """
        reader = self._reader
        name: Range | None = None
        arguments: Range | None = None
        if not (yield from reader.literal("{")):
            return False
        while True:
            yield from reader.skip()
            quoted = yield from reader.string()
            if quoted is None:
                return False
            key = reader.text(*quoted)
            yield from reader.skip()
            if not (yield from reader.literal(":")):
                return False
            yield from reader.skip()
            if key in _ARGUMENTS and arguments is None:
                kind = yield from self._kind_of_arguments()
                if kind is None:
                    return False
                if kind == "null":
                    arguments = Range(reader.at, reader.at)
                    if name is not None:
                        yield from self._empty(name)
                        break
                elif name is not None:
                    yield from self._arguments(name)
                    break
                else:
                    start = reader.at
                    if (yield from reader.string() if kind == '"' else reader.brackets()) in (None, False):
                        return False
                    arguments = Range(start, reader.at)
            elif key == "name" and name is None:
                name = yield from reader.string()
                if name is None or not self._is_name(name):
                    return False
                if arguments is not None:
                    yield from self._late_name(name, arguments)
                    break
            elif key not in _OTHER_KEYS or (yield from reader.string()) is None:
                return False
            yield from reader.skip()
            if name is not None and tagged and (yield from reader.peek()) == "}":
                yield from self._empty(name)
                break
            if not (yield from reader.literal(",")):
                return False
        yield from self._rest_of_object()
        return True

    def _kind_of_arguments(self) -> Reading[str | None]:
        """The first character of arguments: of an object, or of a string with one in it. "null" for null and for a
        string with nothing in it, which are then taken. None where they are not arguments.
        """
        reader = self._reader
        first = yield from reader.peek()
        if first == "{":
            return first
        if first == "n":
            return "null" if (yield from reader.literal("null")) else None
        if first != '"':
            return None
        start = reader.at
        reader.at += 1
        while True:
            text = reader.text(start + 1, reader.at)
            if _HOLDS_OBJECT.fullmatch(text):
                reader.at = start
                return first
            if text.endswith('"') and _HOLDS_NOTHING.fullmatch(text[:-1]):
                return "null"
            begun = text[:-1] if text.endswith("\\") else text
            if not _HOLDS_OBJECT.fullmatch(begun + "{") or not (yield from reader.peek()):
                reader.at = start
                return None
            reader.at += 1

    def _is_name(self, name: Range) -> bool:
        return FUNCTION_NAME.fullmatch(self._reader.text(*name)) is not None

    def _begin(self, call_id: str | None = None, *, empty: bool = False) -> int:
        """Begin a call. Returns its number."""
        if call_id is not None and (not FUNCTION_NAME.fullmatch(call_id) or call_id in [made.id for made in self.made]):
            call_id = None
        self.made.append(MadeCall(call_id, empty))
        return len(self.made) - 1

    def _arguments(self, name: Range, call_id: str | None = None) -> Reading[None]:
        """Begin a call whose name was read, and whose arguments begin here."""
        reader, call = self._reader, self._begin(call_id)
        reader.drop(name.start)
        reader.decide("name", call, name.end)
        reader.keep_together(*name)
        reader.drop(reader.at)
        if (yield from self._decide_arguments(call)):
            yield from self._complete()

    def _late_name(self, name: Range, arguments: Range) -> Reading[None]:
        """Take a call whose name came after its arguments."""
        if arguments.start == arguments.end:
            yield from self._empty(name)
            return
        reader, call, end = self._reader, self._begin(), self._reader.at
        reader.drop(arguments.start)
        reader.at = arguments.start
        yield from self._decide_arguments(call)
        reader.at = end
        reader.drop(name.start)
        reader.decide("name", call, name.end)
        reader.drop(reader.at)
        reader.keep_together(arguments.start, name.end)
        yield from self._complete()

    def _empty(self, name: Range) -> Reading[None]:
        """Take a call without arguments."""
        reader, call = self._reader, self._begin(empty=True)
        reader.drop(name.start)
        reader.decide("name", call, name.end)
        reader.keep_together(*name)
        reader.drop(reader.at)
        yield from self._complete()

    def _decide_arguments(self, call: int) -> Reading[bool]:
        """Read arguments, an object or a string that holds one, as those of `call`. False where they are cut."""
        if (yield from self._reader.literal('"')):
            return (yield from self._quoted_arguments(call))
        return (yield from self._reader.brackets(call=call))

    def _quoted_arguments(self, call: int) -> Reading[bool]:
        """Read the rest of a JSON string that holds an object. The string's own escapes are in no field."""
        reader = self._reader
        yield from reader.skip()
        reader.drop(reader.at)
        string = escaped = False  # inside the object: in a string of its, and after a backslash there
        while character := (yield from reader.peek()):
            start = reader.at
            reader.at += 1
            if character == '"':
                reader.drop(reader.at)
                return True
            if character == "\\":
                character = yield from reader.peek()
                reader.at += bool(character)
                if not character:
                    reader.drop(reader.at)
                    return False
                if character in ('"', "\\", "/"):
                    reader.drop(start + 1)
                elif character in "bfnrt" and not string:
                    # White space between the object's parts, which has no meaning.
                    reader.drop(reader.at)
                    continue
                else:
                    character = ""  # in a string of the object this escape has the same meaning as in ours
            reader.decide("arguments", call, reader.at)
            if not string:
                string = character == '"'
            elif escaped:
                escaped = False
            else:
                string, escaped = character != '"', character == "\\"
        return False

    def _complete(self) -> Reading[None]:
        self.num_completed += 1
        while self.finished:
            yield

    def _rest_of_object(self) -> Reading[None]:
        """Read the members after those that count, if the object ends after them, and its end."""
        reader = self._reader
        if (yield from self._form("}")):
            return
        start = reader.at
        yield from reader.skip()
        if not (yield from reader.literal(",")):
            reader.at = start
        elif (yield from reader.brackets(1)):
            reader.drop(reader.at)

    def _form(self, expected: str) -> Reading[bool]:
        """Take a text of the form, and the space before it, if it stands here or the text is cut within it."""
        reader = self._reader
        start = reader.at
        yield from reader.skip()
        if not (yield from reader.literal(expected)):
            if not (reader.final and expected.startswith(reader.text(reader.at))):
                reader.at = start
                return False
            reader.at = reader.length
        reader.drop(reader.at)
        return True
