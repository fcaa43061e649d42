"""A model folder whose template and tokenizer know tools and reasoning, and an answer that calls two tools."""

from __future__ import annotations

import json
from pathlib import Path

from support.stub_node import make_model_folder
from tokenizers import AddedToken, Tokenizer

VOCAB_SIZE = 402
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if thinking %}<think>
{% endif %}{% endif %}{# </think> #}"""
CALLS = """Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Zürich"}}
</tool_call>
<tool_call>
{"name": "time", "arguments": {}}
</tool_call>"""


def make_tool_model(folder: Path, *, special: bool = True) -> Path:
    """The folder. `special`: whether the markers of calls are special tokens, which those of Qwen are not."""
    folder = make_model_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([AddedToken(marker, special=special) for marker in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
