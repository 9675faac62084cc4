"""A chat template in the manner of Qwen3's: ChatML with tools, reasoning that can be switched off, and calls."""

from __future__ import annotations

QWEN_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Call functions as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>, of these:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}({{ reasoning_effort }}) {% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""

# Models that always think have the template begin it.
OPENED_TEMPLATE = QWEN_TEMPLATE.replace(
    "{%- if enable_thinking is defined and not enable_thinking %}",
    "{%- if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}",
)
