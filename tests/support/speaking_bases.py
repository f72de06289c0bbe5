"""Tokenizers of the small base that speak like today's models: short templates of their kind, and their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.chat.forms.sections import DEEPSEEK, KIMI
from motet.chat.template import Chat
from motet.core.types import IntArray, TurnParts
from motet.model.load import load_tokenizer

_CHAT_ML = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages[::-1] %}
  {%- set i = messages|length - 1 - loop.index0 %}
  {%- if ns.found is not defined and m.role == 'user' %}{% set ns.found = true %}{% set ns.last = i %}{% endif %}
{%- endfor %}
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
  {{- 'INTRODUCTION' }}
  {{- '<tools>' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- set content = m.content or '' %}
    THINKS
    {{- content }}
    {%- for call in m.tool_calls or [] %}
      {%- set call = call.function or call %}
      CALL
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif m.role == 'user' %}
    {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}BEGINS{% endif %}"""

_NEW_LINE = "{% if content or not loop.first %}{{- '\\n' }}{% endif %}"
_JSON_CALL = """NEW_LINE{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
      {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}{{- '}\\n</tool_call>' }}"""
_XML_CALL = """NEW_LINE{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
      {%- for key, value in call.arguments.items() %}
        {{- '<parameter=' + key + '>\\n' }}
        {{- value if value is string else (value | tojson) }}{{- '\\n</parameter>\\n' }}
      {%- endfor %}{{- '</function>\\n</tool_call>' }}"""
_PYTHON_CALL = """{{- ('<|tool_call_start|>[' if loop.first else ', ') + call.name + '(' }}
      {%- for key, value in call.arguments.items() %}
        {{- (', ' if not loop.first else '') + key + '=' }}
        {{- "'" + value + "'" if value is string else (value | tojson) if value is mapping else (value | string) }}
      {%- endfor %}{{- ')' + (']<|tool_call_end|>' if loop.last else '') }}"""
_DROPPED_THOUGHT = """{%- set thought = m.reasoning_content or '' %}
    {%- if not thought and '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}"""
_NO_THINKING = "{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
_OPENED = (
    "{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% else %}{{- '<think>\\n' }}{% endif %}"
)


def _chat_ml(call: str, thinks: str = "", begins: str = "") -> str:
    introduction = "Call tools so: " + ("<function=f>" if "<function=" in call else "<tool_call>{}</tool_call>")
    told = _CHAT_ML.replace("INTRODUCTION", introduction)
    return told.replace("THINKS", thinks).replace("CALL", call.replace("NEW_LINE", _NEW_LINE)).replace("BEGINS", begins)


_GLM = """{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\nTools:' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
    {%- if m.content %}{{- '\\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {%- set call = call.function or call %}
      {{- '\\n<tool_call>' + call.name + '\\n' }}
      {%- for key, value in call.arguments.items() %}
        {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
        {{- value if value is string else (value | tojson) }}{{- '</arg_value>\\n' }}
      {%- endfor %}{{- '</tool_call>' }}
    {%- endfor %}
  {%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
  {%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
  {%- if enable_thinking is false %}{{- '\\n<think></think>' }}{% endif %}
{%- endif %}"""

_LLAMA = """{{- '<|begin_of_text|>' }}
{%- set ns = namespace(told=false) %}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- if m.tool_calls|length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if tools and m.role == 'user' and not ns.told %}
      {%- set ns.told = true %}
      {%- for tool in tools %}{{- (tool | tojson) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- (m.content | trim) + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL = """{{- '<s>' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
  {%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
  {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
  {%- else %}
    THINKS
    {{- m.content or '' }}
    {%- if m.tool_calls %}CALLS{% endif %}
    {{- '</s>' }}
  {%- endif %}
{%- endfor %}"""
_LISTED = """{{- '[TOOL_CALLS][' }}
      {%- for call in m.tool_calls %}
        {%- if (call.id | string | length) != 9 %}{{- raise_exception('ids have nine letters') }}{% endif %}
        {{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
      {%- endfor %}{{- ']' }}"""
_NAMED = """{% for call in m.tool_calls %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
        {{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
      {%- endfor %}"""
_THINK_TOKENS = "{% if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}"

_HARMONY = """{{- '<|start|>system<|message|>You are a model.\\n\\nReasoning: medium\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
  {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {' }}
  {%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}{% endfor %}{{- '\\n}<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set thought = m.thinking or '' %}
    {%- if m.tool_calls %}
      {%- if m.content and thought %}{{- raise_exception('both content and thinking beside a call') }}{% endif %}
      {%- set call = m.tool_calls[0].function or m.tool_calls[0] %}
      {%- set ns.tool = call.name %}
      {%- if m.content or thought %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or thought) + '<|end|>' }}
      {%- endif %}
      {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
      {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}{{- '<|call|>' }}
    {%- elif loop.last and not add_generation_prompt %}
      {%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
  {%- elif m.role == 'tool' %}
    {%- if ns.tool is none %}{{- raise_exception('no call before this result') }}{% endif %}
    {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
  {%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
  {%- else %}{{- '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


_DEEPSEEK = """{{- '<｜begin▁of▁sentence｜>' }}
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}{% if m.role == 'system' %}{{- m.content }}{% endif %}{% endfor %}
{%- if tools %}{{- '\\n\\n## Tools' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{% set ns.asked = true %}
  {%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- elif m.role == 'assistant' %}
    {%- if ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}
    {%- set ns.asked = false %}
    {{- m.content or '' }}
    {%- if m.tool_calls %}
      {{- '<｜tool▁calls▁begin｜>' }}
      {%- for call in m.tool_calls %}
        {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
        {{- '<｜tool▁call▁end｜>' }}
      {%- endfor %}{{- '<｜tool▁calls▁end｜>' }}
    {%- endif %}
    {{- '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}
  {{- '<｜Assistant｜>' + ('<think>' if enable_thinking else '</think>') }}
{%- endif %}"""
_KIMI = """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_assistant|>assistant<|im_middle|><think>' + (m.reasoning_content or '') + '</think>' + (m.content or '') }}
    {%- if m.tool_calls %}
      {{- '<|tool_calls_section_begin|>' }}
      {%- for call in m.tool_calls %}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
        {{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
        {{- '<|tool_call_end|>' }}
      {%- endfor %}{{- '<|tool_calls_section_end|>' }}
    {%- endif %}
  {%- elif m.role == 'tool' %}
    {{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
  {%- else %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}{% endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""


@dataclass(frozen=True)
class Speaker:
    """A kind of base."""

    template: str
    form: str
    """The form that Motet finds for it."""
    tokens: tuple[str, ...] = ()
    """Added tokens that texts show."""
    special: tuple[str, ...] = ()
    """Added tokens that texts do not show."""
    end: str = "<|im_end|>"
    thought: tuple[str, str] | None = None
    opened: str = ""
    """What its prompt writes of a turn."""
    drops_thoughts: bool = False
    """Whether its template writes no thought."""

    @property
    def thinks(self) -> bool:
        """Whether its template writes thoughts."""
        return not self.drops_thoughts and (self.thought is not None or self.form == "harmony")

    def tokenizer(self, *, spelled: bool = False) -> Any:
        """Its tokenizer; `spelled`: without the tokens that texts show, which several tokens then spell."""
        tokenizer = load_tokenizer("small")
        if self.special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        if self.tokens and not spelled:
            tokenizer.add_tokens(list(self.tokens))
        tokenizer.chat_template = self.template
        tokenizer.eos_token = self.end
        return tokenizer


_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_GLM_TOKENS = (*_THINK, *_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_MISTRAL_SPECIAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]",
)  # fmt: skip
_HARMONY_SPECIAL = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip
_DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)  # fmt: skip
_KIMI_SPECIAL = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

SPEAKERS = {
    "qwen25": Speaker(_chat_ml(_JSON_CALL), "hermes", _TOOL_CALL),
    "qwen3": Speaker(
        _chat_ml(_JSON_CALL, _DROPPED_THOUGHT, _NO_THINKING), "hermes", (*_THINK, *_TOOL_CALL), thought=_THINK
    ),
    "qwen3_coder": Speaker(_chat_ml(_XML_CALL), "qwen3_coder", _TOOL_CALL),
    "qwen35": Speaker(
        _chat_ml(_XML_CALL, _DROPPED_THOUGHT, _OPENED), "qwen3_coder", (*_THINK, *_TOOL_CALL), thought=_THINK,
        opened="<think>\n",
    ),
    "glm": Speaker(_GLM, "glm", _GLM_TOKENS, _GLM_SPECIAL, end="<|user|>", thought=_THINK),
    "llama3": Speaker(_LLAMA, "llama3_json", (), _LLAMA_SPECIAL, end="<|eot_id|>"),
    "mistral_old": Speaker(
        _MISTRAL.replace("THINKS", "").replace("CALLS", _LISTED), "mistral", (), _MISTRAL_SPECIAL, end="</s>"
    ),
    "magistral": Speaker(
        _MISTRAL.replace("THINKS", _THINK_TOKENS).replace("CALLS", _NAMED), "mistral", (),
        (*_MISTRAL_SPECIAL, "[ARGS]", "[THINK]", "[/THINK]"), end="</s>", thought=("[THINK]", "[/THINK]"),
    ),
    "gpt_oss": Speaker(_HARMONY, "harmony", (), _HARMONY_SPECIAL, end="<|return|>"),
    "deepseek": Speaker(
        _DEEPSEEK, "deepseek_v3", (*_THINK, *DEEPSEEK.tags), _DEEPSEEK_SPECIAL, end="<｜end▁of▁sentence｜>", thought=_THINK,
        drops_thoughts=True,
    ),
    "lfm2": Speaker(
        _chat_ml(_PYTHON_CALL, _DROPPED_THOUGHT),
        "lfm2", (*_THINK, "<|tool_call_start|>", "<|tool_call_end|>"), thought=_THINK,
    ),
    "kimi": Speaker(_KIMI, "kimi_k2", (*_THINK, *KIMI.tags), _KIMI_SPECIAL, thought=_THINK),
}  # fmt: skip


def own_turn(chat: Chat, parts: TurnParts, called: int = 0) -> IntArray:
    """The tokens of a turn as a base's template writes its parts, with the token that ends it.

    `called` is the number of calls before it, from which the ids of calls go on.
    """
    tokenizer, asked = chat.tokenizer, {"role": "user", "content": "What is 2 and 2?"}
    written = json.dumps if chat.form.name == "deepseek_v3" else dict
    calls = [
        {
            "id": f"functions.{one.name}:{called + at}" if chat.form.name == "kimi_k2" else f"call{called + at:05}",
            "type": "function",
            "function": {"name": one.name, "arguments": written(one.arguments)},
        }
        for at, one in enumerate(parts.calls)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": parts.speech}
    answer |= {"tool_calls": calls} if calls else {}
    answer |= {"reasoning_content": parts.thought, "thinking": parts.thought} if parts.thought else {}
    text = tokenizer.apply_chat_template([asked, answer], tokenize=False, add_generation_prompt=False)
    before = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    assert text.startswith(before)
    turn, end, behind = text[len(before) :].rpartition(tokenizer.eos_token)
    if not end and chat.form.name == "glm":  # its turns end with the beginning of the next one
        end = "<|observation|>" if parts.calls else "<|user|>"
    return np.asarray(tokenizer.encode(turn + end if turn else behind + end, add_special_tokens=False), np.int32)
