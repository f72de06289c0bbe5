"""Short chat templates that write what those of well-known bases write: headers, thoughts, calls, results, ends."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken

from tests.support.scripted_model import CHATML, byte_tokenizer

GPT_OSS = """\
{{- '<|start|>system<|message|>Reasoning: medium<|end|>' }}
{%- set rest = messages %}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
        {%- set rest = messages[1:] %}
    {%- endif %}
    {%- for tool in tools or [] %}
        {{- '\\ntype ' + tool.function.name + ' = (_: ' + (tool.function.parameters | tojson) + ') => any;' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>final<|message|>' in m.content or '<|channel|>analysis<|message|>' in m.content %}
            {{- raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}
        {%- endif %}
        {%- if 'tool_calls' in m %}
            {%- set later = namespace(final=false) %}
            {%- for other in rest[loop.index:] %}
                {%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.final = true %}{% endif %}
            {%- endfor %}
            {%- if m.content and m.thinking %}
                {{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
            {%- elif (m.content or m.thinking) and not later.final %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
            {%- endif %}
            {%- set call = m.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson }}
            {{- '<|call|>' }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if 'thinking' in m %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if last.name is none %}
            {{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
        {%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}
        {{- '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""
_QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall them within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- if not ns.found and m.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            CALL
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if OPENS %}{{- '<think>\\n' }}
    {%- elif enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
_HERMES = """\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"""
_XML = """\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
QWEN3 = _QWEN.replace("CALL", _HERMES).replace("OPENS", "false")
QWEN3_5 = _QWEN.replace("CALL", _XML).replace("OPENS", "enable_thinking is not defined or enable_thinking")
"""Its generation prompt opens the thought."""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if not call.id or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if not m.tool_call_id or m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
GLM = """\
{{- '[gMASK]<sop>' }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {{- '<think>' + (m.reasoning_content.strip() if loop.index0 > ns.last and m.reasoning_content else '') + '</think>' }}
        {%- if m.content.strip() %}{{- '\\n' + m.content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
BASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "chatml": (CHATML, (), (), "<|im_end|>"),
    "gpt-oss": (
        GPT_OSS,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        (),
        "<|return|>",
    ),
    "qwen3": (QWEN3, (), _TAGS, "<|im_end|>"),
    "qwen3.5": (QWEN3_5, (), _TAGS, "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (),
        "<|eot_id|>",
    ),
    "mistral": (
        MISTRAL,
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        (),
        "</s>",
    ),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), (), "<end_of_turn>"),
    "glm": (
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_TAGS, *_ARGUMENTS),
        "<|user|>",
    ),
}
"""By base: its template, its special tokens, its tags that are tokens but not special, and its EOS."""
_BOS = ("<s>", "<bos>", "<|begin_of_text|>")


def tokenizer_of(base: str) -> Any:
    """A tokenizer of bytes with the tokens and the template of a base."""
    template, special, tags, eos = BASES[base]
    tokenizer = byte_tokenizer(template)
    tokens = [AddedToken(name, special=True, normalized=False) for name in special]
    tokenizer.add_tokens([*tokens, *(AddedToken(tag, special=False, normalized=False) for tag in tags)])
    bos = next((name for name in special if name in _BOS), None)
    tokenizer.add_special_tokens({"eos_token": eos, **({"bos_token": bos} if bos else {})})
    return tokenizer
