"""Chat templates and tokenization against transformers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stub_node import StubNode, make_model_folder
from transformers import PreTrainedTokenizerFast

import router.models.served_model
from common.base.errors import BadRequest, ConfigError, Unavailable
from common.config.service_configs import RouterConfig
from common.model.fingerprint import tokenizer_digest
from router.http.openai.chat_messages import Message
from router.models.catalog import ModelCatalog
from router.text.tokenizer import Tokenizer

TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "blocks and whitespace": """{{- bos_token }}
{%- set ns = namespace(last='') %}
    {% for message in messages %}
        {% if loop.index > 5 %}{% break %}{% endif %}
        {% if message.role == 'system' %}{% continue %}{% endif %}
        {% set ns.last = message.content | trim %}
<{{ message.role }}>{{ ns.last }}</{{ message.role }}>
    {% endfor %}
{% if add_generation_prompt %}{% generation %}<assistant>{% endgeneration %}{% endif %}""",
    "what a generation sets": "{% for message in messages %}{% set end = '!' %}{% generation %}{% set end = '.' %}"
    "{{ loop.index }}{{ message.content }}{{ end }}{% endgeneration %}{{ end }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<&>é' | tojson }}{{ unk_token }}{{ tools }}",
    "defaults": "{% if tools is defined and tools %}T{% endif %}{{ strftime_now('%Y') }}{{ messages[-1]['content'] }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<no-think>{% endif %}",
}
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  héllo 🎉  "},
    {"role": "assistant", "content": "the quick brown fox"},
    {"role": "user", "content": "again"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("tokenizer") / "model")


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_rendered_chat_and_its_ids_equal_those_of_transformers(
    folder: Path, name: str, generation_prompt: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    set_config(folder, chat_template=TEMPLATES[name])
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    kwargs = {"enable_thinking": False}
    want = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation_prompt, **kwargs)
    ours = Tokenizer(folder)
    got = ours.render_chat(CHAT, add_generation_prompt=generation_prompt, kwargs=kwargs)
    assert got == want
    assert ours.encode(got, add_special_tokens=False) == oracle(want, add_special_tokens=False)["input_ids"]
    assert ours.encode("the fox 🎉") == oracle("the fox 🎉")["input_ids"]


def test_named_templates_and_files_are_found_in_the_usual_order(folder: Path, tmp_path: Path) -> None:
    set_config(
        folder,
        chat_template=[
            {"name": "tool_use", "template": "tool"},
            {"name": "default", "template": "named {{ eos_token }}"},
        ],
    )
    assert Tokenizer(folder).render_chat(CHAT) == "named </s>"
    file = folder / "chat_template.jinja"
    file.write_text("from the file")
    try:
        assert Tokenizer(folder).render_chat(CHAT) == "from the file"
        override = tmp_path / "mine.jinja"
        override.write_text("mine")
        assert Tokenizer(folder, chat_template=str(override)).render_chat(CHAT) == "mine"
    finally:
        file.unlink()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells <the> weather & 'more'.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Paris?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"t": 20}'},
]
TOOL_TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}]
    {%- if message.content is not defined %}(none){% endif %}
    {%- if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ message.tool_call_id }}:{% endif %}{{ message.content or '' }}
{% endfor %}"""


def test_tools_are_rendered_as_by_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    set_config(folder, chat_template=TOOL_TEMPLATE)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    want = oracle.apply_chat_template(TOOL_CHAT, tools=TOOLS, tokenize=False)
    assert Tokenizer(folder).render_chat(TOOL_CHAT, tools=TOOLS) == want
    assert "(none)city=Zürich" in want
    assert "c1:{" in want


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if message.content is none %}none{% endif %}", "none"),
        ("{% if message.reasoning_content is not none %}{{ message.content }}{% endif %}", ""),
        ("{% if '</think>' not in message.content %}{{ 'said ' + message.content }}{% endif %}", "said "),
        ("{% if message.content is none or message.content.count('x') == 0 %}{{ message.content[:1] }}{% endif %}", ""),
        ("{{ message.tool_calls[0].function.arguments + '!' }}", '{"city": "Zürich"}!'),
        ("{{ '!' + message.tool_calls[0].function.arguments }}", '!{"city": "Zürich"}'),
        ("{{ message.tool_calls[0].function.arguments | tojson }}", '{"city": "Zürich"}'),
    ],
)
def test_templates_that_expect_null_or_text_are_served(folder: Path, template: str, text: str) -> None:
    """As those of DeepSeek do, and the first one of Qwen 3."""
    call = {"function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    set_config(folder, chat_template="{% for message in messages %}" + template + "{% endfor %}")
    assert Tokenizer(folder).render_chat([message.for_template()]) == text


def test_a_template_that_refuses_text_beside_reasoning_and_calls_gets_both_as_reasoning(folder: Path) -> None:
    """As gpt-oss's does, though the model may write all three."""
    call = {"function": {"name": "weather", "arguments": "{}"}}
    sent = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    refuses = (
        "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}{{ m.content }}{{ m.thinking }}"
    )
    message = Message.model_validate(sent).for_template()
    set_config(folder, chat_template="{% for m in messages %}" + refuses + "{% endfor %}")
    assert Tokenizer(folder).render_chat([message]) == "Hm.\n\nI look."
    with pytest.raises(BadRequest, match="not both"):
        Tokenizer(folder).render_chat([{**message, "tool_calls": []}])


def test_a_template_that_needs_descriptions_of_tools_gets_empty_ones(folder: Path) -> None:
    """As gpt-oss's does, though they are optional."""
    set_config(
        folder,
        chat_template="{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}",
    )
    tools = [{"type": "function", "function": {"name": "now"}}, *TOOLS]
    assert Tokenizer(folder).render_chat(CHAT, tools=tools).startswith("// now// ")


def test_requests_with_tools_take_the_template_for_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    set_config(folder, chat_template=named)
    ours = Tokenizer(folder)
    assert ours.render_chat(CHAT) == "plain"
    assert ours.render_chat(CHAT, tools=TOOLS) == "1 tools"
    assert ours.template_source == "{{ tools | length }} tools"


def test_what_a_template_shows_of_tools_is_seen_by_rendering(folder: Path) -> None:
    for template, shown in (
        ("{{ messages }}", False),
        ("{{ tools }}{{ messages }}", True),
        ("{% if tools %}{% endif %}", False),
    ):
        set_config(folder, chat_template=template)
        assert (Tokenizer(folder).takes_tools, Tokenizer(folder).shows_tools) == (True, shown), template
        assert Tokenizer(folder, fits_conversations=False).takes_tools is shown, template


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{{ undefined_thing.field }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_that_refuses_or_misbehaves_is_a_bad_request(folder: Path, template: str) -> None:
    set_config(folder, chat_template=template)
    with pytest.raises(BadRequest, match="chat template"):
        Tokenizer(folder).render_chat(CHAT)


def test_client_variables_cannot_replace_the_special_tokens(folder: Path) -> None:
    set_config(folder, chat_template="{{ bos_token }}{{ messages | length }}")
    assert Tokenizer(folder).render_chat(CHAT, kwargs={"bos_token": "x", "messages": []}) == "<s>4"


@pytest.mark.parametrize(
    "config", [{"image_token": "<img>"}, {"extra_special_tokens": {"image_token": "<img>", "other": ["<a>"]}}]
)
def test_templates_see_special_tokens_that_have_names_of_the_models_own(folder: Path, config: dict[str, Any]) -> None:
    """As in transformers."""
    set_config(folder, chat_template="{{ image_token }}{{ messages[0].content }}{{ add_bos_token }}", **config)
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer(folder).render_chat(messages, kwargs={"image_token": "no"}) == "<img>hi"


def test_documents_are_a_variable_of_the_template(folder: Path) -> None:
    set_config(folder, chat_template="{% for each in documents or () %}{{ each.text }}{% endfor %}")
    assert Tokenizer(folder).render_chat(CHAT, kwargs={"documents": [{"title": "A", "text": "found"}]}) == "found"
    assert Tokenizer(folder).render_chat(CHAT) == ""


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("", "system"),
        ("{% set developer_preamble = '# Developer' %}", "system"),
        ("{% set known = messages[0].role in ['system', 'developer'] %}", "developer"),
        ('{% set known = messages[0].role == "developer" %}', "developer"),
    ],
)
def test_a_developer_is_the_system_where_the_template_knows_none(folder: Path, template: str, role: str) -> None:
    """Qwen's, among others, leaves out messages of roles that it does not know; Command R's has the word elsewhere."""
    set_config(folder, chat_template=template + "{% for message in messages %}{{ message.role }} {% endfor %}")
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert Tokenizer(folder).render_chat(chat) == f"{role} user "
    assert chat[0]["role"] == "developer"


def test_a_file_at_which_the_library_panics_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = json.loads((folder / "tokenizer.json").read_text())
    broken["model"] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    broken["model"]["continuing_subword_prefix"] = "a" * 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match=r"cannot load .*tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_post_processor_with_tokens_that_there_are_not_is_refused(folder: Path, tmp_path: Path) -> None:
    """The library reads it and panics at the first text."""
    broken = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    broken["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match=r"cannot load .*tokenizer\.json"):
        Tokenizer(tmp_path)


def test_missing_or_broken_files_are_one_clear_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ConfigError, match=r"cannot load .*tokenizer\.json"):
        Tokenizer(tmp_path)
    set_config(folder, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer(folder)
    set_config(folder, chat_template=None)
    with pytest.raises(BadRequest, match="no chat template"):
        Tokenizer(folder).render_chat(CHAT)
    set_config(folder, chat_template=["{{ messages }}", 7])
    with pytest.raises(ConfigError, match="must list names"):
        Tokenizer(folder)
    set_config(folder, chat_template=None)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    try:
        with pytest.raises(ConfigError, match=r"cannot read the chat template .*chat_template\.jinja"):
            Tokenizer(folder)
    finally:
        (folder / "chat_template.jinja").unlink()


def test_model_that_fails_to_load_in_any_way_is_told_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("odd")

    async def main() -> None:
        node = StubNode("decode", "d0", "/models/odd", automatic=False)
        catalog = ModelCatalog(RouterConfig())
        try:
            catalog.accept([node.record])
            async with asyncio.timeout(20):
                while "/models/odd cannot be loaded: RuntimeError" not in problem(catalog):
                    await asyncio.sleep(0.001)
        finally:
            catalog.close()
            await node.close()

    def problem(catalog: ModelCatalog) -> str:
        with pytest.raises(Unavailable) as told:
            catalog.get(None)
        return told.value.message

    monkeypatch.setattr(router.models.served_model, "load", fail)
    asyncio.run(main())


def test_nodes_with_another_tokenizer_are_ignored_and_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Token ids would mean other text to them; their KV and their answers would be wrong without an error."""

    async def main() -> None:
        nodes = [StubNode("decode", name, str(folder), automatic=False) for name in ("same", "other", "untold")]
        records = [node.record for node in nodes]
        digests = (tokenizer_digest(folder), "0" * 32, "")
        records = [
            replace(record, model=replace(record.model, tokenizer=digest))
            for record, digest in zip(records, digests, strict=True)
        ]
        catalog = ModelCatalog(RouterConfig(model=str(folder)))
        try:
            await catalog.load_configured()
            accepted = catalog.accept(records)
            assert [record.peer.node_id for record in accepted] == ["same", "untold"]
        finally:
            catalog.close()
            for node in nodes:
                await node.close()

    asyncio.run(main())
    assert "other is ignored: its tokenizer.json for stub-model differs" in caplog.text


def test_a_router_without_the_nodes_tokenizer_says_so_to_clients(folder: Path) -> None:
    """The folder that the nodes named exists on this machine, too, with another tokenizer in it."""

    async def main() -> None:
        node = StubNode("decode", "d0", str(folder), automatic=False)
        catalog = ModelCatalog(RouterConfig())

        def problem() -> str:
            with pytest.raises(Unavailable) as told:
                catalog.get(None)
            return told.value.message

        try:
            catalog.accept([replace(node.record, model=replace(node.record.model, tokenizer="0" * 32))])
            async with asyncio.timeout(20):
                while "differs from that of the nodes" not in problem():
                    await asyncio.sleep(0.001)
        finally:
            catalog.close()
            await node.close()

    asyncio.run(main())


def test_a_template_that_refuses_every_user_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """The router once was ready with it, and every chat failed."""
    template = tmp_path / "template.jinja"
    for source in ("{{ raise_exception('no') }}", "{{ messages[0]['nothing']['here'] }}"):
        template.write_text(source)
        with pytest.raises(ConfigError, match="refuses a single message of a user"):
            Tokenizer(folder, chat_template=str(template)).check_template()
    Tokenizer(folder).check_template()


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)


def test_an_effort_of_reasoning_sets_the_templates_variables(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ reasoning_effort }} {{ 'thinks' if enable_thinking else 'does not' }}")
    assert tokenizer.render_chat(CHAT, effort="low") == "low thinks"
    assert tokenizer.render_chat(CHAT, effort="none") == "none does not"
    assert tokenizer.render_chat(CHAT, effort="low", kwargs={"enable_thinking": False}) == "low does not"


def test_templates_that_call_it_thinking_are_told_too(folder: Path) -> None:
    tokenizer = with_template(
        folder, "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
    )
    assert tokenizer.render_chat(CHAT, effort="low") == "True"
    assert tokenizer.render_chat(CHAT, effort="none") == "False"
    assert tokenizer.render_chat(CHAT) == "False"
    assert tokenizer.render_chat(CHAT, kwargs={"enable_thinking": True}) == "True"
    assert tokenizer.render_chat(CHAT, kwargs={"enable_thinking": True, "thinking": False}) == "False"


def test_a_template_without_reasoning_refuses_an_effort(folder: Path) -> None:
    tokenizer = with_template(folder, "plain")
    assert tokenizer.render_chat(CHAT, effort="none") == "plain"
    with pytest.raises(BadRequest, match="reasoning_effort is not supported"):
        tokenizer.render_chat(CHAT, effort="low")


def lists_tokens(folder: Path, ids: list[int], where: str) -> None:
    """As after a fine-tune whose tokenizer.json is still that of the base model."""
    names = ["<|im_start|>", "<|im_end|>"]
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    if where == "added_tokens.json":
        (folder / where).write_text(json.dumps(dict(zip(names, ids, strict=True))))
        set_config(folder, eos_token=names[1])
        return
    listed = {str(i): {"content": name, "special": True, **flags} for i, name in zip(ids, names, strict=True)}
    set_config(folder, eos_token=names[1], added_tokens_decoder=listed)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_only_other_files_list_are_tokens_as_in_transformers(tmp_path: Path, where: str) -> None:
    """Prompts had their letters, and no answer ended."""
    folder = make_model_folder(tmp_path / "model")
    first = len(Tokenizer(folder).pieces._tokenizer.get_vocab())
    lists_tokens(folder, [first, first + 1], where)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    text = "<|im_start|>the fox<|im_end|>"
    ids = theirs.encode(text)
    assert (ids[0], ids[-1]) == (first, first + 1)
    assert ours.encode(text) == ids
    assert ours.eos_token_id == theirs.eos_token_id == first + 1
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "added_tokens.json"])
def test_a_listed_token_that_cannot_have_its_id_is_refused(tmp_path: Path, where: str) -> None:
    folder = make_model_folder(tmp_path / "model")
    lists_tokens(folder, [1000, 1001], where)
    with pytest.raises(ConfigError, match=rf"{where} gives the token '<.im_start.>' the id 1000"):
        Tokenizer(folder)


def test_a_broken_list_of_added_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    for listed in ({"3": "text"}, {"x": {"content": "a"}}, [1], {"3": {}}):
        set_config(folder, added_tokens_decoder=listed)
        with pytest.raises(ConfigError, match="does not list added tokens"):
            Tokenizer(folder)


def test_the_end_token_is_special_whatever_tokenizer_json_says(tmp_path: Path) -> None:
    """It stood in answers."""
    folder = make_model_folder(tmp_path / "model")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"special": true', '"special": false'))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    ids = ours.encode("fox</s>")
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True) == "fox"


@pytest.mark.parametrize(
    "named",
    [
        {"eos_token": "<|end|>"},
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "rstrip": True}},
        {"additional_special_tokens": ["<|end|>"]},
        {"extra_special_tokens": ["<|end|>"]},
        {"extra_special_tokens": {"end_token": "<|end|>"}},
        {"image_token": "<|end|>"},
    ],
)
@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_are_tokens_where_only_the_vocabulary_has_them(
    tmp_path: Path, named: dict[str, Any], where: str
) -> None:
    """Prompts had their letters."""
    folder = make_model_folder(tmp_path / "model")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["<|end|>"] = len(raw["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    if where == "tokenizer_config.json":
        set_config(folder, **named)
    else:
        (folder / where).write_text(json.dumps(named))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    ids = ours.encode("the fox<|end|> the")
    assert ids == theirs.encode("the fox<|end|> the")
    assert ours.special_id("<|end|>") == theirs.convert_tokens_to_ids("<|end|>") in ids


def test_the_older_map_of_special_tokens_goes_first_as_in_transformers(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|assistant|>"}))
    for changes in ({}, {"added_tokens_decoder": {}}):
        set_config(folder, **changes)
        expected = PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id
        assert Tokenizer(folder).eos_token_id == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "<|assistant|>{{ messages[0].content }}",
            r"writes '<\|assistant\|>', which is token 4, and the model has only 1:",
        ),
        ("{{ eos_token }}{{ messages[0].content }}", "writes '</s>', which is token 1, and the model has only 1:"),
    ],
    ids=["itself", "by a variable"],
)
def test_a_template_that_writes_tokens_beyond_the_models_vocabulary_is_refused(
    template: str, said: str, tmp_path: Path
) -> None:
    """Each request to such a model failed, with an error that named no token."""
    folder = make_model_folder(tmp_path / "model")
    set_config(folder, chat_template=template)
    Tokenizer(folder).check_vocabulary(400)
    with pytest.raises(ConfigError, match=said):
        Tokenizer(folder).check_vocabulary(1)
    set_config(folder, chat_template="{{ messages[0].content }}")
    Tokenizer(folder).check_vocabulary(1)  # it is not written
