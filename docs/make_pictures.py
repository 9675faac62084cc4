"""Make the pictures of README, for light and for dark pages: `python docs/make_pictures.py` writes docs/pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot, rc_context

from neper import LLM, Completion, LogprobParams, SamplingParams, plot

PICTURES = Path(__file__).parent / "pictures"
DPI = 110
# matplotlib's colours for dark backgrounds, on the background that code hosts have.
PAGES: dict[str, list[Any]] = {
    "light": ["default"],
    "dark": ["dark_background", {"figure.facecolor": "#0d1117", "axes.facecolor": "#0d1117"}],
}
TEXTS = {
    "card": "She went to the bank to open an account. Then she paid with her card.",
    "fish": "She went to the bank to open an account. Then she paid with her fish.",
}
QUESTION = "Who wrote Hamlet?"


def replies(llm: LLM) -> tuple[list[Completion], Completion]:
    """The texts with the scores of their tokens, and a reply with its alternatives."""
    scored = llm.generate(list(TEXTS.values()), SamplingParams(max_tokens=0), LogprobParams(prompt_top_k=0))
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    [reply] = llm.generate(prompt, SamplingParams(temperature=0.7, seed=3, max_tokens=9), LogprobParams(top_k=6))
    return scored, reply


def save(name: str, axes: Any) -> None:
    axes.figure.savefig(PICTURES / f"{name}.png", dpi=DPI, metadata={"Software": None})
    pyplot.close(axes.figure)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    scored, reply = replies(LLM("smollm2-135m", dtype="float32"))
    for page, styles in PAGES.items():
        with rc_context(), pyplot.style.context(styles):
            save(f"surprisal-{page}", plot.surprisal(*scored, labels=list(TEXTS)))
            save(f"heatmap-{page}", plot.heatmap(reply, top=5))


if __name__ == "__main__":
    main()
