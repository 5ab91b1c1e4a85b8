"""The chat template of Gemma 4, written anew: `published_templates.py` says what it equals."""

from __future__ import annotations

_GEMMA = """\
{%- macro spelt(value, quotes=false) -%}
  {%- if value is none -%}{{- 'null' -}}
  {%- elif value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
  {%- elif value is mapping -%}
    {{- '{' -}}
    {%- for key, inner in value | dictsort -%}
      {{- (',' if not loop.first else '') + ('<|"|>' + key + '<|"|>' if quotes else key) + ':' -}}
      {{- spelt(inner, quotes) -}}
    {%- endfor -%}
    {{- '}' -}}
  {%- elif value is sequence -%}
    {{- '[' -}}
    {%- for inner in value -%}
      {{- (',' if not loop.first else '') + spelt(inner, quotes) -}}
    {%- endfor -%}
    {{- ']' -}}
  {%- else -%}{{- value | string | lower if value is boolean else value -}}
  {%- endif -%}
{%- endmacro -%}
{%- macro fields(properties) -%}
  {%- for name, field in properties | dictsort -%}
    {%- set type = field.type | default('') | upper -%}
    {{- (',' if not loop.first else '') + name + ':{' -}}
    {%- if field.description -%}
      {{- 'description:' + spelt(field.description) + ',' -}}
    {%- endif -%}
    {%- if type == 'STRING' and field.enum -%}
      {{- 'enum:' + spelt(field.enum, true) + ',' -}}
    {%- elif type == 'ARRAY' and field['items'] -%}
      {{- 'items:{' -}}
      {%- for key, value in field['items'] | dictsort if value is not none -%}
        {{- (',' if not loop.first else '') + key + ':' -}}
        {%- if key == 'properties' -%}{{- '{' + fields(value) + '}' -}}
        {%- else -%}{{- spelt(value | upper if key == 'type' else value, true) -}}
        {%- endif -%}
      {%- endfor -%}
      {{- '},' -}}
    {%- endif -%}
    {{- 'nullable:true,' if field.nullable else '' -}}
    {%- if type == 'OBJECT' -%}
      {{- 'properties:{' + fields(field.properties or {}) + '},' -}}
      {{- 'required:' + spelt(field.required) + ',' if field.required else '' -}}
    {%- endif -%}
    {{- 'type:' + spelt(type) + '}' -}}
  {%- endfor -%}
{%- endmacro -%}
{%- macro words(content, by_model) -%}
  {%- for part in ([content] if content is string else content or []) -%}
    {%- set text = part if part is string else part.text | default('') -%}
    {%- if by_model -%}
      {%- set kept = namespace(text='') -%}
      {%- for piece in text.split('<channel|>') -%}
        {%- set kept.text = kept.text + piece.split('<|channel>')[0] -%}
      {%- endfor -%}
      {%- set text = kept.text -%}
    {%- endif -%}
    {{- '<|image|>' if part is not string and part.type == 'image' else text | trim -}}
  {%- endfor -%}
{%- endmacro -%}
{%- set thinking = enable_thinking | default(false) -%}
{%- set keeps = preserve_thinking | default(false) -%}
{%- set now = namespace(before='', after='', query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set now.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- if thinking or tools or messages[0].role == 'system' -%}
  {{- '<|turn>system\\n' + ('<|think|>\\n' if thinking else '') -}}
  {%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- for part in ([] if system is string else system) -%}
      {{- part.text | trim + ' ' -}}
    {%- else -%}{{- words(system) -}}
    {%- endfor -%}
  {%- endif -%}
  {%- for tool in tools or [] -%}
    {%- set tool = tool.function -%}
    {{- '<|tool>declaration:' + tool.name + '{description:' + spelt(tool.description) -}}
    {%- if tool.parameters -%}
      {{- ',parameters:{' -}}
      {%- if tool.parameters.properties -%}
        {{- 'properties:{' + fields(tool.parameters.properties) + '},' -}}
      {%- endif -%}
      {%- if tool.parameters.required -%}
        {{- 'required:' + spelt(tool.parameters.required) + ',' -}}
      {%- endif -%}
      {{- 'type:' + spelt(tool.parameters.type | upper) + '}' -}}
    {%- endif -%}
    {{- '}<tool|>' -}}
  {%- endfor -%}
  {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|turn>user\\n' + words(message.content) + '<turn|>\\n' -}}
    {%- set now.before = 'user' -%}
    {%- set now.after = '' -%}
  {%- elif message.role == 'assistant' -%}
    {%- set at = loop.index0 -%}
    {%- set next = namespace(role='', tools=true, results=[]) -%}
    {%- for later in messages[at + 1:] -%}
      {%- if later.role != 'tool' -%}
        {%- set next.tools = false -%}
        {%- set next.role = next.role or later.role -%}
      {%- elif next.tools and message.tool_calls -%}
        {%- set next.results = next.results + [later] -%}
      {%- endif -%}
    {%- endfor -%}
    {%- set thought = message.reasoning or message.reasoning_content or '' -%}
    {%- set thinks = thought and (at > now.query or (keeps and message.tool_calls)) -%}
    {%- set asked = now.after if now.before == 'assistant' else '' -%}
    {%- set opened = thinks and (thinking and asked == 'result' or 'EMPTY' and not thinking
        and now.before != 'assistant') -%}
    {%- set answer = words(message.content, true) -%}
    {%- if now.before != 'assistant' -%}{{- '<|turn>model\\n' -}}{%- endif -%}
    {{- '<|channel>thought\\n' if opened else '' -}}
    {%- set end = '' if next.role == 'assistant' and (next.results or not message.tool_calls)
        else '' if next.results and not answer and not next.role else '<turn|>' -%}
    {%- generation -%}
    {{- ('' if opened else '<|channel>thought\\n') + thought + '\\n<channel|>' if thinks else '' -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<|tool_call>call:' + call.function.name + spelt(call.function.arguments or {}) -}}
      {{- '<tool_call|>' -}}
    {%- endfor -%}
    {{- '' if next.results else answer -}}
    {{- '<|tool_response>' if message.tool_calls else end -}}
    {%- endgeneration -%}
    {%- for result in next.results -%}
      {%- set named = namespace(name=result.name or 'unknown') -%}
      {%- for call in message.tool_calls -%}
        {%- if call.id == result.tool_call_id -%}
          {%- set named.name = call.function.name -%}
        {%- endif -%}
      {%- endfor -%}
      {%- set parts = [] if result.content is string else result.content -%}
      {%- set text = namespace(all=result.content if result.content is string else '') -%}
      {%- for part in parts -%}
        {%- set text.all = text.all + part.text | default('') -%}
      {%- endfor -%}
      {{- '' if loop.first else '<|tool_response>' -}}
      {{- 'response:' + named.name + '{value:' + spelt(text.all) + '}<tool_response|>' -}}
      {%- for part in parts if part.type == 'image' -%}{{- '<|image|>' -}}{%- endfor -%}
    {%- endfor -%}
    {{- answer + end if next.results else '' -}}
    {{- '\\n' if end and (next.results or not message.tool_calls) else '' -}}
    {%- set now.before = 'assistant' -%}
    {%- set now.after = 'result' if next.results else 'call' if message.tool_calls else '' -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if not now.after -%}
    {{- '<|turn>model\\n' + ('' if thinking else 'EMPTY') -}}
  {%- elif now.after == 'result' and thinking -%}{{- '<|channel>thought\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def gemma(empty: str = "") -> str:
    """One of the line.

    Args:
        empty: what a prompt without thinking ends in.
    """
    return _GEMMA.replace("EMPTY", empty)
