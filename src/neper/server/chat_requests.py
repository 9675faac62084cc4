"""From chat bodies to a generation: messages to a prompt, fields to engine requests."""

from __future__ import annotations

from typing import Any

from neper.server.chat_protocol import ChatBody
from neper.server.generation import Generation, Prompt
from neper.server.requests import check_logprobs, new_generation
from neper.server.service import Service
from neper.types import JsonObject, LogprobParams


async def chat_generation(service: Service, body: ChatBody, reply_id: str) -> Generation:
    top_k = body.num_top_logprobs()
    check_logprobs(service.engine.capabilities, "top_logprobs", top_k)
    continues = bool(body.continue_final_message)
    generates = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    token_ids = await service.encode_chat(
        [_message(message.role, message.content, message.name) for message in body.messages or ()],
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=body.chat_template_kwargs,
    )
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = LogprobParams(top_k=top_k, prompt_top_k=body.prompt_logprobs)
    prompt = Prompt(token_ids)
    return new_generation(
        service, body, reply_id, [prompt], logprobs, max_tokens, default=None, begins_text=not continues
    )


def _message(role: str, content: Any, name: str | None) -> JsonObject:
    if isinstance(content, list):
        content = [{"type": part.type, "text": part.text} for part in content]
    # OpenAI's newer name for the system role, which templates do not know.
    message: JsonObject = {"role": "system" if role == "developer" else role, "content": content}
    if name is not None:
        message["name"] = name
    return message
