"""The engine on its kernels: the same tokens and scores as in plain torch on a CPU, whatever launches its steps."""

from __future__ import annotations

import gc
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity

from neper.engine import memory
from neper.engine.core import EngineCore
from neper.engine.draft.depth import Depth
from neper.engine.draft.drafting import Drafting
from neper.errors import StartupError
from neper.ops import backends
from neper.ops.attention import reference as attention_reference
from neper.ops.fused import reference as fused_reference
from neper.ops.linear import reference as linear_reference
from neper.ops.logprobs import reference as scoring_reference
from neper.types import FinishReason, LogprobParams, PackedRows, Request, SamplingParams
from tests.engine import test_view_rows as view_rows
from tests.engine.test_random_drafts import Habit, Knowing, key
from tests.helpers.engine import Result, make_core, prompts, request, run
from tests.helpers.prediction_layer import QWEN, PredictionLayer
from tests.helpers.tiny import VOCAB_SIZE
from tests.kernels.scoring import DEVICE, INTERPRETED, some

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs, streams and the profiler need a GPU")
# Interpreted, a step takes a second.
STEPS, CHUNK, SHRINK = (3, 16, 3) if INTERPRETED else (16, 32, 1)
BIAS = {7: 2.0, 9: -math.inf}
REFERENCES = {
    "scoring": scoring_reference,
    "steps": None,
    "attention": attention_reference,
    "fused": fused_reference,
    "linear": linear_reference,
}


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        for family in ("steps", "attention", "fused", "linear"):
            serve = getattr(backends, family)
            monkeypatch.setattr(backends, family, lambda _, *sizes, serve=serve: serve(torch.device("cuda"), *sizes))


def kernel_core(directory: Path, **config: Any) -> EngineCore:
    """An engine on the kernels, in float32."""
    values: dict[str, Any] = {"device": DEVICE, "max_num_batched_tokens": CHUNK}
    if DEVICE == "cuda":
        values["kv_cache_memory"] = 8 * 2**20
    return make_core(directory, **(values | config))


@contextmanager
def reference() -> Iterator[None]:
    """Plain torch everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        for family, module in REFERENCES.items():
            patch.setattr(backends, family, lambda *_, module=module: module)
        yield


def mixed() -> list[Request]:
    """Every kind of row: plain, scored, drawn, filtered, edited; prompts longer than a step."""
    texts = [prompts(1, -(-n // SHRINK), seed=n)[0] for n in (21, 60, 9, 1, 14, 33)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=STEPS),
        SamplingParams(temperature=0, max_tokens=STEPS),
        SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=STEPS),
        SamplingParams(temperature=0, max_tokens=STEPS, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=1.2, top_k=20, min_p=0.01, seed=3, max_tokens=STEPS, logit_bias=BIAS),
        SamplingParams(temperature=1.0, seed=4, max_tokens=STEPS),
    ]
    ks = [(None, None), (5, 2), (20, None), (0, None), (None, 0), (1, 20)]
    return [
        request(str(i), text, sampling[i], top_k=k, prompt_top_k=prompt_k)
        for i, (text, (k, prompt_k)) in enumerate(zip(texts, ks, strict=True))
    ]


def one_token() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1)


def greedy(count: int, top_k: int | None, *, tokens: int = STEPS) -> list[Request]:
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    return [request(str(i), text, sampling, top_k=top_k) for i, text in enumerate(prompts(count, 12))]


def drawn(count: int, top_k: int | None) -> list[Request]:
    return [
        request(str(i), text, SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=STEPS), top_k=top_k)
        for i, text in enumerate(prompts(count, 12))
    ]


def bits(results: dict[str, Result]) -> dict[str, list[bytes]]:
    return {
        name: [rows.data for chunk in result.chunks for rows in (chunk.prompt, chunk.tokens) if rows is not None]
        for name, result in results.items()
    }


def assert_close(got: PackedRows, want: PackedRows) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    if got.top_k is None:
        return
    assert np.abs(got.logprob - want.logprob).max(initial=0) <= 1e-4
    assert np.abs(got.top_logprobs - want.top_logprobs).max(initial=0) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", *(["llama", "qwen2", "mistral"] if DEVICE == "cuda" else [])])
def test_a_mixed_batch_agrees_with_plain_torch_on_a_cpu(architecture: str, tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir(architecture, **({"sliding_window": 16} if architecture == "mistral" else {}))
    with reference():
        want = run(make_core(directory, max_num_batched_tokens=CHUNK), mixed())
    got = run(kernel_core(directory), mixed())
    for name, result in want.items():
        assert got[name].finish_reason is result.finish_reason
        assert_close(got[name].tokens, result.tokens)
        if any(chunk.prompt for chunk in result.chunks):
            assert_close(got[name].prompt, result.prompt)


def test_long_lists_share_their_memory(tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than whole vocabularies would fit, each with more places than the rows that are scored together."""
    monkeypatch.setattr("neper.engine.settings.MAX_LISTED", 2 * VOCAB_SIZE)
    directory, texts = tiny_dir("llama"), prompts(3, 6)
    asked: list[dict[str, Any]] = [
        {"top_k": 70, "prompt_top_k": 70},
        {"prompt_top_k": 0, "prompt_logprob_token_ids": tuple(range(9, 379, 5))},
        {"top_k": 75, "prompt_top_k": 2},
    ]
    items = [
        Request(request_id=f"{i}", prompt_token_ids=text, sampling=one_token(), logprobs=LogprobParams(**fields))
        for i, (text, fields) in enumerate(zip(texts, asked, strict=True))
    ]
    sizes = {"max_logprobs": -1, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    with reference():
        want = run(make_core(directory, **sizes), items)
    for name, result in run(kernel_core(directory, **sizes), items).items():
        assert len(result.prompt) == 5
        assert_close(result.prompt, want[name].prompt)
        assert_close(result.tokens, want[name].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("config", some([{"overlap": True}], [{"scoring": "host"}]))
def test_views_sets_and_masks(config: dict[str, Any], tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("llama")
    core = kernel_core(directory, max_logprobs=-1, max_num_seqs=16, **config)
    cases = {name: case for place, (name, case) in enumerate(view_rows.CASES.items()) if place % 2 or not INTERPRETED}
    texts = prompts(len(cases), -(-24 // SHRINK), seed=5)
    items = [
        view_rows.ask(name, text, sampling | {"max_tokens": STEPS}, logprobs)
        for (name, (sampling, logprobs)), text in zip(cases.items(), texts, strict=True)
    ]
    # Two of them score their prompts too, one over the whole vocabulary.
    for place, top_k in ((0, 3), (1, -1)):
        asked = msgspec.structs.replace(items[place].logprobs, prompt_top_k=top_k)
        items[place] = msgspec.structs.replace(items[place], logprobs=asked)
    results = run(core, items)
    for item in items:
        assert len(results[item.request_id].token_ids) == STEPS
        view_rows.check(item, results[item.request_id], directory)
    for place, top_k in ((0, 3), (1, view_rows.V)):
        rows = results[items[place].request_id].prompt
        assert rows.top_k == top_k
        for i, view in enumerate(view_rows.views(*view_rows.as_reply(items[place].prompt_token_ids), directory)):
            assert np.abs(rows.top_logprobs[i] - view.logprobs[rows.top_ids[i]]).max() <= view_rows.TOLERANCE


@pytest.mark.slow
def test_overlap_gives_the_same_bits(tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("qwen3")
    plain = run(kernel_core(directory, overlap=False), mixed())
    assert bits(run(kernel_core(directory, overlap=True), mixed())) == bits(plain)


def test_case_70_a_penalised_request_ends_while_its_next_step_is_begun(tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("llama")
    texts = prompts(2, 4, seed=7)
    penalties = {"temperature": 0.0, "presence_penalty": 0.4, "repetition_penalty": 1.2, "max_tokens": 6}
    with reference():
        free = run(make_core(directory), [request("a", texts[1], SamplingParams(**penalties))])["a"].token_ids
        place = next(i for i in range(1, 6) if free[i] not in free[:i])
        waits = SamplingParams(temperature=0.0, bad_words=((5, 6),), max_tokens=place + 2)
        ends = SamplingParams(**penalties, stop_token_ids=(free[place],))
        items = [request("waits", texts[0], waits, top_k=2), request("ends", texts[1], ends)]
        want = run(make_core(directory), items)
    got = run(kernel_core(directory, overlap=True), items)
    for name, result in want.items():
        assert got[name].finish_reason is result.finish_reason
        assert_close(got[name].tokens, result.tokens)
    assert got["ends"].finish_reason is FinishReason.STOP


@pytest.mark.slow
def test_scores_on_the_host_are_the_devices(tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("qwen3")
    device, host = (run(kernel_core(directory, scoring=place), mixed()) for place in ("device", "host"))
    for name, result in device.items():
        assert_close(host[name].tokens, result.tokens)
        if any(chunk.prompt for chunk in result.chunks):
            assert_close(host[name].prompt, result.prompt)


@pytest.mark.slow
def test_off_is_off(tiny_dir: Callable[..., Path]) -> None:
    """off, k = 20, off: the third run equals the first, and the tokens do not depend on who asks."""
    core = kernel_core(tiny_dir("qwen3"), prefix_caching=False)
    first, scored, third = (run(core, greedy(3, top_k)) for top_k in (None, 20, None))
    assert bits(first) == bits(third)
    for name, result in first.items():
        assert result.token_ids == scored[name].token_ids
    assert core.stats().scored_rows == 3 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("value", some([], [math.nan, math.inf]))
def test_only_the_request_with_nan_fails(value: float, tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    clean, poison = tiny_dir("llama"), 383
    poisoned = tmp_path / "poisoned"
    shutil.copytree(clean, poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = value
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    texts = prompts(4, 60 // SHRINK)
    broken = [*texts[1][:9], poison, *texts[1][10:]]
    sampling = SamplingParams(temperature=0, max_tokens=STEPS)
    batch = [
        request("0", texts[0], sampling, top_k=5, prompt_top_k=2),
        request("bad", broken, SamplingParams(temperature=0, max_tokens=1), top_k=5),
        request("2", texts[2], sampling),
        request("3", texts[3], SamplingParams(temperature=1.0, seed=1, max_tokens=STEPS)),
    ]
    core = kernel_core(poisoned)
    results = run(core, batch)
    assert results["bad"].finish_reason is FinishReason.ERROR
    want = bits(run(kernel_core(clean), batch))
    got = bits(results)
    for name in ("0", "2", "3"):
        assert got[name] == want[name], name
    # Its blocks are used again, and nothing of it was kept as a prefix.
    refill = [request(str(i), text, sampling, top_k=3) for i, text in enumerate(prompts(4, 72 // SHRINK, seed=9))]
    assert bits(run(core, refill)) == bits(run(kernel_core(clean), refill))


@pytest.mark.slow
def test_every_allocation_that_fails_at_start_says_what_to_lower(
    tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start-up allocation in turn: an error with the size and the setting, and nothing is left behind."""
    directory = tiny_dir("qwen3")
    made: list[str] = []
    failing: list[int] = []
    reserve = memory.reserve

    def counted(what: str, setting: str, nbytes: int, make: Callable[[], Any], device: torch.device) -> Any:
        made.append(what)

        def no_memory() -> Any:
            raise torch.OutOfMemoryError("injected")

        return reserve(what, setting, nbytes, no_memory if len(made) - 1 in failing else make, device)

    monkeypatch.setattr(memory, "reserve", counted)
    for scoring in ("device", "host"):
        failing.clear()
        made.clear()
        kernel_core(directory, scoring=scoring)
        everything = list(made)
        assert "logprobs" in everything
        on_gpu = {"results on the host", *(["logits on the host"] if scoring == "host" else [])}
        assert {"logits", "results", "the KV cache", *(on_gpu if DEVICE == "cuda" else ())} <= set(everything)
        for number, what in enumerate(everything):
            failing[:] = [number]
            gc.collect()
            before = allocated()
            made.clear()
            with pytest.raises(StartupError, match=rf"no memory for {what}: [\d.]+ \w+ on \w+.*; lower [a-z_]+"):
                kernel_core(directory, scoring=scoring)
            gc.collect()
            assert allocated() == before, f"the engine that had no memory for {what} left something behind"


@needs_gpu
def test_an_engine_gives_back_all_of_its_memory(tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("qwen3")
    run(kernel_core(directory), mixed())
    gc.collect()
    before = allocated()
    for _ in range(2):
        run(kernel_core(directory), mixed())
        gc.collect()
        assert allocated() == before


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


@needs_gpu
def test_graphs_and_overlap_give_the_same_bits(tiny_dir: Callable[..., Path]) -> None:
    directory = tiny_dir("qwen3")
    # A budget of 2 leaves prompts single tokens a step, which are scored among rows that decode.
    tight = [request(str(i), text, top_k=2, prompt_top_k=3) for i, text in enumerate(prompts(2, 9))]
    for batch, budget in (
        (mixed(), CHUNK),
        (greedy(5, 20), CHUNK),
        (greedy(8, None), CHUNK),
        (drawn(7, 5), CHUNK),
        (tight, 2),
    ):
        config = {"max_num_batched_tokens": budget}
        want = bits(run(kernel_core(directory, cuda_graphs=False, overlap=False, **config), batch))
        for graphs, overlap in ((True, False), (False, True), (True, True)):
            got = run(kernel_core(directory, cuda_graphs=graphs, overlap=overlap, **config), batch)
            assert bits(got) == want, (graphs, overlap, budget)


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_host_waits_for_nothing_but_the_results(tiny_dir: Callable[..., Path], overlap: bool) -> None:
    core = kernel_core(tiny_dir("qwen3"), overlap=overlap)
    read = core.runner.readback.read

    def may_wait(output: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(output)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    run(core, mixed())  # what the first step of a kind sets up
    core.runner.readback.read = may_wait  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(core, mixed())
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()  # the mode would have said so
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profiled(core: EngineCore, requests: list[Request], steps: int) -> Counter[str]:
    """What the profiler sees in `steps` steps of decoding, by name; the requests are then dropped."""
    for item in requests:
        core.add(item)
    for _ in range(4):
        core.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(steps):
            core.step()
    for item in requests:
        core.abort(item.request_id)
    return Counter(event.name for event in profile.events())


def kernels(seen: Counter[str]) -> Counter[str]:
    """The kernels of a decode step's second half, of what the profiler saw."""
    names = ("best", "draw", "weigh", "finish", "keep", "read", "select", "pack_best", "pack_chosen")
    return Counter({name: count for name, count in seen.items() if name.removesuffix("_kernel") in names})


@needs_gpu
@pytest.mark.parametrize(("top_k", "words"), [(None, 6), (20, 129)])
def test_counters_equal_what_the_profiler_sees(top_k: int | None, words: int, tiny_dir: Callable[..., Path]) -> None:
    core = kernel_core(tiny_dir("qwen3"), prefix_caching=False, max_num_batched_tokens=64)
    run(core, greedy(3, 20))
    before = core.stats()
    names = profiled(core, greedy(3, top_k, tokens=200), 100)
    after = core.stats()
    copies = sum(count for name, count in names.items() if name.startswith("Memcpy DtoH"))
    waits = sum(names[name] for name in ("cudaEventSynchronize", "cudaStreamSynchronize"))
    assert abs(copies - 100) <= 1  # the step at either end may be just outside
    assert abs(waits - 100) <= 1
    assert after.d2h_copies - before.d2h_copies == 104
    assert after.d2h_waits - before.d2h_waits == 103
    assert after.d2h_bytes - before.d2h_bytes == 104 * 4 * words


@needs_gpu
def test_off_launches_no_scoring_kernel(tiny_dir: Callable[..., Path]) -> None:
    core = kernel_core(tiny_dir("qwen3"), prefix_caching=False)
    run(core, greedy(3, 20))
    off, scored, again = (kernels(profiled(core, greedy(3, top_k, tokens=60), 20)) for top_k in (None, 20, None))
    assert off == again
    assert set(off) == {"best_kernel", "pack_best_kernel"}
    assert set(scored) == {"best_kernel", "keep_kernel", "read_kernel", "select_kernel", "pack_chosen_kernel"}


@needs_gpu
def test_scoring_allocates_nothing(tiny_dir: Callable[..., Path]) -> None:
    core = kernel_core(tiny_dir("qwen3"), prefix_caching=False)
    peaks = []
    for top_k in (20, None, 20):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(core, greedy(4, top_k))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] == peaks[1]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", some([True], [False]))
def test_drafts_change_no_token(overlap: bool, tiny_dir: Callable[..., Path]) -> None:
    """Windows of right and wrong drafts beside rows without, as graphs where there are some."""
    directory = tiny_dir("qwen3")
    items = [item for item in mixed() if item.sampling.max_tokens]
    want = run(kernel_core(directory, overlap=overlap), items)
    core = kernel_core(directory, overlap=overlap, speculative="ngram", draft_tokens=4)
    replies = {key(item): want[item.request_id].token_ids for item in items}
    for habit in (Habit(1, "wrong"), Habit(3, "end"))[: 1 if INTERPRETED else 2]:
        core._drafting = Drafting(Knowing(replies, habit), most=4, rows=24, vocab_size=core.capabilities.vocab_size)
        got = run(core, items)
        for name, result in want.items():
            assert got[name].finish_reason is result.finish_reason
            assert_close(got[name].tokens, result.tokens)
        assert core._drafting.counters.accepted_tokens >= len(items)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", some([True], [False]))
def test_a_prediction_layer_changes_no_token(overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps on kernels, as graphs where there are some, read the hidden states of steps on kernels."""
    PredictionLayer(tmp_path, "qwen3", QWEN)
    monkeypatch.setattr(Depth, "wanted", 3)
    items = [item for item in mixed() if item.sampling.max_tokens][: 4 if INTERPRETED else None]
    want = run(kernel_core(tmp_path, overlap=overlap), items)
    core = kernel_core(tmp_path, overlap=overlap, speculative="mtp", draft_tokens=3)
    got = run(core, items)
    for name, result in want.items():
        assert got[name].finish_reason is result.finish_reason
        assert_close(got[name].tokens, result.tokens)
    assert core.stats().draft_tokens >= len(items)
