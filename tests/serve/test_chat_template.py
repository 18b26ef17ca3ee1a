"""Chat templates of unknown origin: rendered as transformers renders them, and unable to do harm."""

import asyncio
import json

import pytest

from holdfast.serve import chat_template
from holdfast.serve.api_errors import ApiError
from holdfast.serve.chat_template import ChatTemplate, find_template
from holdfast.system.errors import HoldfastError

MESSAGES = [{"role": "user", "content": "hello <b> \u00fc"}]


def render(*templates, messages=MESSAGES):
    """What each template renders, or the error that it gets, one after the other in one event loop."""

    async def run():
        found = []
        for template in templates:
            chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
            try:
                found.append(await chat.render(messages))
            except ApiError as error:
                found.append(error)
            finally:
                await chat.close()
        return found

    return asyncio.run(run())


def test_templates_have_what_transformers_gives_them():
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = [
        "{{ bos_token }}{{ messages | tojson }}{% if add_generation_prompt %}!{% endif %}\n",
        "{% for m in messages %}\n  {%- if loop.first %}{{ m.content[:3] }}{% continue %}{% endif %}\n{% endfor %}end",
        "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}{{ strftime_now('%Y') }}",
        "{{ messages | tojson(ensure_ascii=True, indent=2, separators=(',', ':'), sort_keys=True) }}",
        "{% if tools is not none or documents is not none %}tools{% endif %}",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    ]
    expected = [
        render_jinja_template([MESSAGES], chat_template=one, add_generation_prompt=True, bos_token="<s>")[0][0]
        for one in templates
    ]
    assert render(*templates) == expected


HOSTILE = {
    "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "file": "{% include '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}",
    "memory": "{{ 'a' * 10**10 }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def test_a_hostile_template_is_refused_as_an_error_of_the_request():
    for name, found in zip(HOSTILE, render(*HOSTILE.values()), strict=True):
        assert isinstance(found, ApiError) and 400 <= found.status < 500, (name, found)


def test_an_error_in_a_template_is_named():
    division, missing = render("{{ 1 / 0 }}", "{{ messages[0].content.nothing() }}")
    assert (division.status, missing.status) == (400, 400)
    assert "ZeroDivisionError" in str(division) and "UndefinedError" in str(missing)


def test_a_template_without_end_is_stopped_and_the_next_request_is_served(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.5)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    template = f"{{% if messages | length > 1 %}}{endless}{{% endif %}}ok"

    async def run():
        chat = ChatTemplate(template, {})
        with pytest.raises(ApiError, match="exceeds its limits"):
            await chat.render(MESSAGES * 2)
        monkeypatch.setattr(chat_template, "RENDER_SECONDS", 60)
        text = await chat.render(MESSAGES)
        await chat.close()
        return text

    assert asyncio.run(run()) == "ok"


def test_where_a_template_is_found(tmp_path):
    assert find_template([tmp_path, tmp_path / "missing"]) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert find_template([tmp_path]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template([tmp_path]) == "file"
    (tmp_path / "chat_template.jinja").write_text("x" * (300 << 10))
    with pytest.raises(HoldfastError, match="larger than"):
        find_template([tmp_path])
