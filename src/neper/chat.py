"""One chat turn on the command line: the reply as it is generated, with the probability of every token."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from neper.config import EngineConfig
from neper.progress import ProgressLine
from neper.shown import ShownToken, shown_tokens, summary
from neper.terminal import PLAIN_HEADER, alternatives_table, legend, plain_line, printable, shaded
from neper.types import LogprobParams, SamplingParams

if TYPE_CHECKING:
    from neper.engine.llm import TextDelta


def chat(
    config: EngineConfig,
    text: str,
    *,
    system: str | None,
    sampling: SamplingParams,
    top: int,
    plain: bool,
) -> None:
    """Generate a reply to `text` in this process and print it, shaded on a terminal, as numbers elsewhere."""
    # A console that cannot show a character gets its escape. It must not crash.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    plain = plain or not console.is_terminal or console.no_color or console.color_system is None
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})

    from neper.models import source
    from neper.text.tokenizer import Tokenizer

    with ProgressLine(sys.stderr) as progress:
        model = source.resolve(config.model, progress=progress)
        # A model without a chat template is an error before its weights are read.
        Tokenizer.from_directory(model.path).apply_chat_template(messages)
        from neper.engine.llm import LLM

        llm = LLM(progress=progress, **dataclasses.asdict(config))
    stream = llm.stream_chat(messages, sampling, LogprobParams(top_k=top))
    tokens, finish_reason = _print_stream(console, stream, llm.tokenizer.token_bytes, plain)
    if plain:
        print("\n" + printable("".join(token.text for token in tokens)), flush=True)
    elif top:
        console.print()
        console.print(alternatives_table(tokens, console.encoding))
    notes = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not plain:
        notes.print(legend(), soft_wrap=True)
    notes.print(summary(tokens, finish_reason), soft_wrap=True)


def _print_stream(
    console: Console, stream: Iterator[TextDelta], token_bytes: Callable[[int], bytes], plain: bool
) -> tuple[list[ShownToken], str]:
    """Print the tokens as they come. Returns them and the finish reason."""
    tokens: list[ShownToken] = []
    finish_reason = ""
    if plain:
        print(PLAIN_HEADER, flush=True)
    for delta in stream:
        new = (
            [] if delta.rows is None else shown_tokens([token.text for token in delta.tokens], delta.rows, token_bytes)
        )
        tokens += new
        if plain:
            for token in new:
                print(plain_line(token, console.encoding), flush=True)
        else:
            console.print(shaded(new), end="", soft_wrap=True)
        if delta.finish_reason is not None:
            finish_reason = delta.finish_reason.value
    if not plain:
        console.print()
    return tokens, finish_reason
