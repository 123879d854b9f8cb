"""Chat templates: transformers' text for the templates that models come with; bounds for those that would do harm."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from workers.engine.text import template_limits
from workers.engine.text.chat_template import ChatTemplate
from workers.engine.text.template_limits import TemplateLimit

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Hi there, <b>you</b>!\n\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Why?"}],
    "turns": [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
        {"role": "user", "content": "+ 1 = ?"},
        {"role": "assistant", "content": "3", "reasoning_content": "also easy"},
        {"role": "user", "content": "\n thanks 🌍 "},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "name": "get", "content": '{"sun": "yes"}'},
        {"role": "tool", "name": "get", "content": "no"},
    ],
}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
        "You are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
        "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif "
        "%}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
        "raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
        "loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
        "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if "
        "message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] "
        "== 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%Y') if false else '26"
        " Jul 2024' %}{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system_message = "
        "messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- "
        "endif %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Today Date: ' + date_string + '\\n\\n' "
        "}}{{- system_message }}{{- '<|eot_id|>' }}{%- for message in messages %}{%- if not (message.role == 'ipython' "
        "or message.role == 'tool' or 'tool_calls' in message) %}{{- '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}{%- elif 'tool_calls' in message %}{%- "
        "if not message.tool_calls|length == 1 %}{{- raise_exception('one tool call at once!') }}{%- endif %}{%- endif "
        "%}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- "
        "endif %}"
    ),
    "qwen-3": (
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in "
        "messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and "
        "message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and"
        " message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set "
        "ns.last_query_index = index %}{%- endif %}{%- endfor %}{%- for message in messages %}{%- if message.content "
        "is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}{%- if "
        "(message.role == 'user') or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role "
        "+ '\\n' + content + '<|im_end|>' + '\\n' }}{%- elif message.role == 'assistant' %}{%- set reasoning_content = "
        "'' %}{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- "
        "else %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')"
        ".split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- "
        "endif %}{%- endif %}{%- if loop.index0 > ns.last_query_index %}{{- '<|im_start|>' + message.role + "
        "'\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- else "
        "%}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}{%- if message.tool_calls %}{%- for "
        "tool_call in message.tool_calls %}{%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif "
        '%}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}{{- \'<tool_call>\\n{"name"'
        ': "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}{%- if tool_call.arguments is string %}{{- '
        "tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- "
        "endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}{%- if loop.first or "
        "(messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' "
        "}}{{- content }}{{- '\\n</tool_response>' }}{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') "
        "%}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- "
        "'<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- "
        "'<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
        "endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
        "raise_exception('Conversation roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% "
        "set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' "
        "+ message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt "
        "%}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "macros": (
        "{%- macro shown(value, depth=0) -%}{%- if value is mapping -%}{%- for key, item in value|dictsort -%}{{ ' ' * "
        "depth }}{{ key|title }}: {{ shown(item, depth + 1) }}{%- endfor -%}{%- elif value is iterable and value is not"
        " string -%}{{ value|map('string')|join(', ') }}{%- else -%}{{ value|default('-', true)|string|indent(2) }}{%- "
        "endif -%}{%- endmacro -%}{%- for message in messages if message.role != 'tool' recursive -%}{%- if "
        "loop.changed(message.role) -%}## {{ message.role|upper }}{{ '\\n' }}{%- endif -%}{% generation %}{{ "
        "shown(message) }}{% endgeneration %}{%- if loop.index > 30 -%}{%- break -%}{%- endif -%}{%- endfor -%}{%- set "
        "users = messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list -%}{{ users|tojson(indent"
        "=2) }}{{ '%s of %03d' % (users[0][:3], users|length) }}{{ '{}/{:>5}'.format(users|first, 2 ** 5) }}{{ "
        "messages|groupby('role')|map('first')|join('~') }}{{ dict(a=1) }}{{ range(3)|list }}{{ (1, 'a', [none]) }}"
    ),
}


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_the_text_is_that_of_transformers(style: str, chat: str) -> None:
    source, messages = TEMPLATES[style], CHATS[chat]
    try:
        wanted, _ = render_jinja_template(
            conversations=[messages], chat_template=source, add_generation_prompt=True, **TOKENS
        )
    except Exception as error:
        refusal = error
    else:
        assert ChatTemplate(source).render(messages, TOKENS) == wanted[0]
        return
    with pytest.raises(type(refusal), match=re.escape(str(refusal))):
        ChatTemplate(source).render(messages, TOKENS)


BLOW = "{% set ns = namespace(x=[messages[0]]) %}{% for i in range(70) %}{% set ns.x = "
SIZE = "characters|units of work"
HARMFUL = {
    "text times": ("{{ 'a' * 10**10 }}", SIZE),
    "constant text times": ("{% if false %}{{ 'aa' * 100000000 }}{% endif %}{{ 'aa' * 100000000 }}", SIZE),
    "list times": ("{% set x = [1] * 10**9 %}", SIZE),
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(70) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        SIZE,
    ),
    "joined": (
        "{% set ns = namespace(x='ab') %}{% for i in range(70) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        SIZE,
    ),
    "power": ("{{ 7 ** (10 ** 6) }}", "bits"),
    "squares": (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "bits",
    ),
    "rounding": ("{{ 1|round(-1000000000) }}", "bits"),
    "loops": ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "units of work"),
    "filtered loops": (
        "{% for a in range(9999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "units",
    ),
    "selecting": ("{% for a in range(9999) %}{{ range(99999)|select('lt', 0)|list }}{% endfor %}", "units of work"),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "units of work",
    ),
    "output": ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", SIZE),
    "lists in lists": (BLOW + "[ns.x, ns.x] %}{% endfor %}{{ ns.x == 1 }}", SIZE),
    "tuples in tuples": (BLOW + "(ns.x, ns.x) %}{% endfor %}{% set d = {ns.x: 1} %}", SIZE),
    "depth": (BLOW + "[ns.x] %}{% endfor %}{{ ns.x|tojson(indent=4) }}", "deep"),
    "dicts in dicts": (BLOW + "dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|tojson }}", SIZE),
    "sum of lists": ("{{ [[1] * 99999] * 9 | sum(start=[]) }}", "adds up lists"),
    "center": ("{{ 'a'|center(9999999999) }}", SIZE),
    "ljust": ("{{ 'a'.ljust(9999999999) }}", SIZE),
    "tabs": ("{{ ('\t' * 1000).expandtabs(1000000) }}", SIZE),
    "indent": ("{{ ('a\n' * 9000)|indent(99999) }}", SIZE),
    "replace": ("{{ ('a' * 9999).replace('a', 'b' * 9999) }}", SIZE),
    "replace filter": ("{{ ('a' * 9999)|replace('a', 'b' * 9999) }}", SIZE),
    "join": ("{{ range(99999)|join('b' * 9999) }}", SIZE),
    "join of generators": ("{{ ('b' * 9999).join(range(99999)|map('string')) }}", SIZE),
    "join of a reversed list": ("{{ ['b' * 9999999] | list | reverse | map('string') | list * 9 | join }}", SIZE),
    "batch": ("{{ [1]|batch(999999999, 0)|list }}", "items"),
    "slice": ("{{ [1]|slice(999999999, 0)|list }}", "items"),
    "split": ("{{ ('a ' * 999999).split(' ') }}", "items"),
    "list of text": ("{{ ('a' * 999999)|list }}", "items"),
    "json": ("{{ {'a': [1]}|tojson(indent=999999999) }}", SIZE),
    "format width": ("{{ '{:>9999999999}'.format(1) }}", SIZE),
    "format width of an argument": ("{{ '{:>{}}'.format(1, 9999999999) }}", SIZE),
    "format repeated": ("{{ ('{0}' * 99999).format('a' * 9999) }}", SIZE),
    "percent width": ("{{ '%9999999999d' % 1 }}", SIZE),
    "percent star": ("{{ '%*d' % (9999999999, 1) }}", "width from an argument"),
    "percent repeated": ("{{ ('%(a)s' * 99999) % {'a': 'a' * 9999} }}", SIZE),
    "format filter": ("{{ '%9999999999d'|format(1) }}", SIZE),
    "slices kept": (
        "{% set ns = namespace(x=[]) %}{% set a = 'a' * 9999999 %}{% for i in range(999) %}"
        "{% set ns.x = ns.x + [a[1:]] %}{% endfor %}",
        SIZE,
    ),
    "times": ("{{ strftime_now('%999999999Y' * 99999) }}", SIZE),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_a_template_that_takes_too_much_is_stopped_by_name(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_WORK", 2**23)
    source, bound = HARMFUL[what]
    template = ChatTemplate(source)
    started = time.thread_time()
    with pytest.raises(TemplateLimit, match=bound):
        template.render(CHATS["question"], TOKENS)
    assert time.thread_time() - started < 2


def test_a_template_has_so_much_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    slow = "{% set big = 'a' * 9999999 %}{% for i in range(9999) %}{% if 'b' in big %}{% endif %}{% endfor %}"
    started = time.thread_time()
    with pytest.raises(TemplateLimit, match="seconds"):
        ChatTemplate(slow).render(CHATS["question"], TOKENS)
    assert time.thread_time() - started < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ 'a'.encode().hex() }}",
        "{{ namespace(_x=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'a' %}",
        "{{ lipsum(9) }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(source: str) -> None:
    with pytest.raises((TemplateError, TypeError)):
        ChatTemplate(source).render(CHATS["question"], TOKENS)
