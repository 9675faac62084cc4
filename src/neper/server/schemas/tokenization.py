"""Schemas of ids, of texts, and of facts about the tokenizer."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from neper.server.schemas.common import Count, Schema, TokenId


class Tokens(Schema, kw_only=True):
    """`token_strs`: the text of each token alone, where it was asked for."""

    tokens: list[TokenId]
    count: Count
    max_model_len: Count
    token_strs: list[str] | UnsetType = UNSET


class Text(Schema):
    """`token_strs`: as above."""

    prompt: str
    token_strs: list[str] | UnsetType = UNSET


class SpecialToken(Schema):
    id: TokenId
    token: str


class TokenizerInfo(Schema):
    """What the tokenizer is. `logits_size` may exceed `vocab_size`; `eos_token_ids` are all that end a reply."""

    kind: str
    vocab_size: Count
    logits_size: Count
    max_model_len: Count
    bos_token: str | None
    bos_token_id: TokenId | None
    eos_token: str | None
    eos_token_id: TokenId | None
    eos_token_ids: list[TokenId]
    pad_token: str | None
    pad_token_id: TokenId | None
    special_tokens: list[SpecialToken]
    adds_bos: bool
    chat_template: str | dict[str, str] | None
