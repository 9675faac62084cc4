"""Tokenization over HTTP: text to ids, ids to text, and facts about the tokenizer."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from neper.errors import InvalidRequestError
from neper.server.bodies.tokenization import DetokenizeBody, TokenizeBody
from neper.server.replies.encoding import encode
from neper.server.requests.chat import chat_prompt
from neper.server.schemas.tokenization import SpecialToken, Text, TokenizerInfo, Tokens
from neper.server.service import Service
from neper.server.transport.asgi import send_json, unless_left

MAX_TOKENS = 2**16
"""Most ids that a text may become, if the context has fewer."""


async def tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = await service.read_json(scope, receive, TokenizeBody)
    service.check_model(body.model)
    tokens = await unless_left(_ids(service, body), receive)
    reply = Tokens(tokens=tokens, count=len(tokens), max_model_len=service.engine.capabilities.max_model_len)
    if body.return_token_strs:
        reply.token_strs = [service.tokenizer.token_text(token_id) for token_id in tokens]
    await send_json(send, encode(reply))


async def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return await chat_prompt(service, body.conversation())
    limit = max(MAX_TOKENS, service.engine.capabilities.max_model_len)
    return await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, limit=limit)


async def detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = await service.read_json(scope, receive, DetokenizeBody)
    service.check_model(body.model)
    vocab_size = service.engine.capabilities.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise InvalidRequestError(f"tokens: ids must be in 0..{vocab_size - 1}", param="tokens")

    def decode() -> bytes:
        reply = Text(service.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace"))
        if body.return_token_strs:
            reply.token_strs = list(map(service.tokenizer.token_text, body.tokens))
        return encode(reply)

    await send_json(send, await service.run(len(body.tokens), decode))


async def tokenizer_info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    tokenizer, capabilities = service.tokenizer, service.engine.capabilities
    named, template = tokenizer.named_tokens, tokenizer.chat_template
    info = TokenizerInfo(
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        logits_size=capabilities.vocab_size,
        max_model_len=capabilities.max_model_len,
        bos_token=named.get("bos_token"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token=named.get("eos_token"),
        eos_token_id=tokenizer.eos_token_id,
        eos_token_ids=list(service.eos_token_ids),
        pad_token=named.get("pad_token"),
        pad_token_id=tokenizer.pad_token_id,
        special_tokens=[
            SpecialToken(token_id, tokenizer.token_text(token_id)) for token_id in sorted(tokenizer.special_token_ids)
        ],
        adds_bos=tokenizer.adds_bos,
        chat_template=template if template is None or isinstance(template, str) else dict(template),
    )
    await send_json(send, encode(info))
