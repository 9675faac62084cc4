"""The kernels run compiled where there is a GPU, else in Triton's interpreter, where TRITON_INTERPRET=1 asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from neper.ops import backends
from tests.kernels.scoring import DEVICE, INTERPRETED, WHY_SKIPPED

# The kernels compute inf - inf, log(0) and the like and discard them, of which numpy warns; and the interpreter makes
# Python's loop bounds from arrays of one element, which numpy 2.4 no longer allows.
_INTERPRETER_WARNINGS = (
    ".* encountered.*:RuntimeWarning",
    "Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
)


@pytest.hookimpl(tryfirst=True)  # before -m deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if WHY_SKIPPED:
            item.add_marker(pytest.mark.skip(reason=WHY_SKIPPED))
        elif DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)
        elif INTERPRETED:
            for accepted in _INTERPRETER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{accepted}"))


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter puts its own functions into triton.language at every call of a device function, again and
    again; once a launch is enough, and takes half the time."""
    if not INTERPRETED or WHY_SKIPPED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    languages: dict[Callable[..., Any], tuple[int, ...]] = {}
    patched: set[tuple[int, ...]] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in languages:
            languages[function] = tuple(
                id(value) for value in function.__globals__.values() if value is tl or value is tl.core
            )
        if languages[function] in patched:
            return None  # a device function, whose caller ignores it
        launch = not patched
        patched.add(languages[function])
        scope = patch_lang(function)
        if launch:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    with mock.patch.object(interpreter, "_patch_lang", patch_once):
        yield


@pytest.fixture(autouse=True)
def _kernels_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter the kernels serve the CPU."""
    if DEVICE == "cpu":
        from neper.ops.logprobs import launch

        monkeypatch.setattr(backends, "scoring", lambda device: launch)
