"""Names that other servers have for fields, and the one to use here instead."""

from __future__ import annotations

OTHER_NAMES = {
    "guided_json": 'structured_outputs: {"json": schema}',
    "guided_regex": 'structured_outputs: {"regex": pattern}',
    "guided_choice": 'structured_outputs: {"choice": [texts]}',
    "guided_grammar": 'structured_outputs: {"grammar": text}',
    "guided_decoding": "structured_outputs",
    "guided_decoding_backend": "structured_outputs, which names no backend",
    "guided_whitespace_pattern": "structured_outputs, where white space is free",
    "json_schema": 'response_format: {"type": "json_schema", "json_schema": ...}',
    "grammar": 'structured_outputs: {"grammar": text}',
    "regex": 'structured_outputs: {"regex": pattern}',
    "ebnf": 'structured_outputs: {"grammar": text}',
    "format": "response_format",
    "options": "the fields of this API, beside messages",
    "sampling_params": "the fields of this API, beside the prompt",
    "parameters": "the fields of this API, beside the prompt",
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_gen_len": "max_tokens",
    "min_new_tokens": "min_tokens",
    "max_output_tokens": "max_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature: 0 for the likeliest token",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "n_probs": "logprobs",
    "num_logprobs": "logprobs",
    "return_logprob": "logprobs",
    "top_logprobs_num": "logprobs",
    "logprob_start_len": "prompt_logprobs_start",
    "return_text_in_logprobs": "logprobs, whose entries have texts",
    "return_tokens": "return_token_ids",
    "decoder_input_details": "prompt_logprobs",
    "details": "logprobs",
    "inputs": "prompt",
    "text": "prompt",
    "input_ids": "prompt, with token ids",
    "prompt_token_ids": "prompt, with token ids",
    "system": 'messages, with one of role "system"',
    "think": 'chat_template_kwargs: {"enable_thinking": bool}',
    "enable_thinking": 'chat_template_kwargs: {"enable_thinking": bool}',
    "thinking": 'chat_template_kwargs: {"enable_thinking": bool}',
    "template_kwargs": "chat_template_kwargs",
    "return_probs": "logprobs",
}


def advice(name: str) -> str:
    """The end of an unknown field's error, from `; ` on; "" for a name that no server is known to use."""
    instead = OTHER_NAMES.get(name)
    return "" if instead is None else f"; here it is {instead}"
