"""Cases 11 to 16: bytes and texts of tokens."""

from __future__ import annotations

import codecs
from typing import Any

import pytest

from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.chat_replies import joined
from tests.helpers.invariants import Json, check_reply
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import VOCAB_SIZE, Client

EMOJI = [{"role": "user", "content": "Reply with a single emoji."}]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2 of the tiny tokenizers


@pytest.mark.model
def test_case_11_an_emoji_is_its_raw_bytes(embedded: RealServer) -> None:
    body: Json = {"messages": EMOJI, "temperature": 0, "logprobs": True, "top_logprobs": 5, "max_tokens": 24}
    whole = embedded.choice(CHAT, **body)["message"]["content"]
    assert max(map(ord, whole)) > 0xFFFF
    assert "\ufffd" not in whole
    for stream in (False, True):
        for n in (1, 2):
            for choice in embedded.full(CHAT, **body, n=n, stream=stream)["choices"]:
                assert joined(choice["logprobs"]["content"]) == (whole, whole.encode())
        # Cut anywhere: the bytes are those that the model wrote, and U+FFFD stands where a character is not whole.
        for max_tokens in range(1, 5):
            choice = embedded.choice(CHAT, **body | {"max_tokens": max_tokens, "stream": stream})
            text, data = joined(choice["logprobs"]["content"])
            assert whole.encode().startswith(data)
            assert text == choice["message"]["content"] == data.decode("utf-8", "replace")
    # The same characters as a prompt.
    prompt = embedded.choice(COMPLETIONS, prompt=whole, echo=True, logprobs=0, max_tokens=0)
    assert prompt["text"] == whole
    assert "\ufffd" not in "".join(prompt["logprobs"]["tokens"])


@pytest.mark.parametrize("text", ["“curly” naïve quotes", "日 😀 é", "👩‍👩‍👧"])
def test_case_12_alternatives_are_decoded_after_what_was_sampled(scripted: Client, text: str) -> None:
    ids = scripted.say(text)
    body: Json = {"max_tokens": len(ids), "logprobs": True, "top_logprobs": 20}
    entries = scripted.chat(**body)["choices"][0]["logprobs"]["content"]
    assert joined(entries) == (text, text.encode())
    assert [entry for entry in entries if entry["token"] == ""], "some character must take several tokens"
    start = len(scripted.engine.submitted[-1].prompt_token_ids)
    token_bytes = scripted.tokenizer.token_bytes
    for place, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
        before = b"".join(map(token_bytes, ids[:place]))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = decoder.decode(before)
        held = decoder.getstate()[0]
        expected = []
        for other in top(scores(start + place, token_id, VOCAB_SIZE), 20):
            data = token_bytes(other)
            special = other in scripted.tokenizer.special_token_ids
            alone = data if special else held + data
            expected.append((codecs.getincrementaldecoder("utf-8")("replace").decode(alone), list(data)))
        assert [(item["token"], item["bytes"]) for item in entry["top_logprobs"]] == expected
        assert shown + entry["token"] == text.encode()[: len(before) + len(entry["bytes"])].decode(errors="ignore")
    # The legacy arrays: a part of a character is spelled by its bytes, which name it in a dict as well.
    arrays = scripted.complete(logprobs=20, max_tokens=len(ids))["choices"][0]["logprobs"]
    for place, (token, best) in enumerate(zip(arrays["tokens"], arrays["top_logprobs"], strict=True)):
        assert token in best
        if entries[place]["token"]:
            assert token == entries[place]["token"]
        else:
            assert token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entries[place]["bytes"])


def test_case_14_a_leading_space_tells_tokens_apart(scripted: Client, tiny: RealServer) -> None:
    [plain], [spaced] = tiny.ids("the"), tiny.ids(" the")
    body: Json = {"logprobs": 0, "max_tokens": 1, "temperature": 0, "logprob_token_ids": [plain, spaced]}
    [best] = tiny.choice(COMPLETIONS, **body)["logprobs"]["top_logprobs"]
    assert best["the"] != best[" the"]
    [by_id] = tiny.choice(COMPLETIONS, **body, return_tokens_as_token_ids=True)["logprobs"]["top_logprobs"]
    assert (best["the"], best[" the"]) == (by_id[f"token_id:{plain}"], by_id[f"token_id:{spaced}"])
    # Ids without a token all read "": the best of them is the value, however many are listed.
    scripted.say([383])
    row = scores(1, 383, VOCAB_SIZE)
    for k in range(1, 21):
        listed = top(row, k)
        [best] = scripted.complete(logprobs=k, max_tokens=1)["choices"][0]["logprobs"]["top_logprobs"]
        nameless = [i for i in (*listed, 383) if i >= 330]
        assert best[""] == pytest.approx(max(float(row[i]) for i in nameless))
        assert len(best) == len({i if i < 330 else -1 for i in (*listed, 383)})


@pytest.mark.model
def test_case_14_a_value_does_not_change_with_the_length_of_the_list(embedded: RealServer) -> None:
    fixed: Json = {"prompt": "Is the sky blue? Answer true or false:", "max_tokens": 4, "temperature": 0, "echo": True}
    longest = embedded.choice(COMPLETIONS, **fixed, logprobs=20)["logprobs"]
    embedded.choice(COMPLETIONS, **fixed, logprobs=20)
    for k in range(1, 20, 3):
        arrays = embedded.choice(COMPLETIONS, **fixed, logprobs=k)["logprobs"]
        assert arrays["token_logprobs"] == longest["token_logprobs"]
        for best, all_of_them in zip(arrays["top_logprobs"][1:], longest["top_logprobs"][1:], strict=True):
            assert best.items() <= all_of_them.items()


@pytest.mark.parametrize("skip", [None, True, False])
def test_case_15_special_tokens_have_their_own_text(tiny: RealServer, skip: bool | None) -> None:
    named: Json = {"logprob_token_ids": [0, 1, 2, 40], "skip_special_tokens": skip, "seed": 2, "max_tokens": 3}
    entries = tiny.choice(CHAT, **named, logprobs=True)["logprobs"]["content"]
    for entry in entries:
        texts = {item["token"]: bytes(item["bytes"]) for item in entry["top_logprobs"]}
        assert texts.items() >= {text: text.encode() for text in SPECIAL}.items()
    for best in tiny.choice(COMPLETIONS, **named, logprobs=0)["logprobs"]["top_logprobs"]:
        assert best.keys() >= set(SPECIAL)
    # Sampled ones: the legacy arrays list every one, chat's content those that are in the text.
    only: Json = {"allowed_token_ids": [0, 1], "seed": 4, "max_tokens": 6, "skip_special_tokens": skip}
    legacy = tiny.choice(COMPLETIONS, **only, logprobs=0, return_token_ids=True)
    assert legacy["logprobs"]["tokens"] == [SPECIAL[token_id] for token_id in legacy["token_ids"]]
    assert {"<|endoftext|>", "<|im_start|>"} == set(legacy["logprobs"]["tokens"])
    assert legacy["text"] == ("".join(legacy["logprobs"]["tokens"]) if skip is False else "")
    chat = tiny.choice(CHAT, **only, logprobs=True, return_token_ids=True)
    spelled = "".join(SPECIAL[token_id] for token_id in chat["token_ids"]) if skip is False else ""
    assert chat["message"]["content"] == spelled
    assert joined(chat["logprobs"]["content"]) == (spelled, spelled.encode())


@pytest.mark.parametrize("server_name", ["tiny", pytest.param("embedded", marks=pytest.mark.model)])
def test_case_16_tokens_are_text_and_no_pieces_of_a_vocabulary(server_name: str, request: Any) -> None:
    server: RealServer = request.getfixturevalue(server_name)
    prompt = "Hello, what is the capital of France?\nThe answer"
    body: Json = {"prompt": prompt, "max_tokens": 8, "logprobs": 20, "echo": True, "temperature": 0}
    choice = server.choice(COMPLETIONS, **body)
    check_reply("completions", body, {"object": "text_completion", "choices": [choice]})
    arrays = choice["logprobs"]
    assert " the" in arrays["tokens"]
    names = {name for best in arrays["top_logprobs"][1:] for name in best} | set(arrays["tokens"])
    assert len(names) > 50
    # No letter that a byte-level vocabulary writes for a space, a newline or a tab.
    assert not [name for name in names if set(name) & set("ĠĊĉ▁")]
    prompt_tokens = arrays["tokens"][: len(server.ids(prompt))]
    assert "".join(prompt_tokens) == prompt
    entries = server.choice(CHAT, messages=EMOJI, logprobs=True, top_logprobs=20, max_tokens=8)["logprobs"]["content"]
    for item in [item for entry in entries for item in (entry, *entry["top_logprobs"])]:
        assert not set(item["token"]) & set("ĠĊĉ▁")
        if item["token"].isascii():  # what follows may begin a character
            assert bytes(item["bytes"]).startswith(item["token"].encode())
