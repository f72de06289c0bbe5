#!/usr/bin/env bash
# openai 3.51.0, Python 3.11 (2026-11-30).
#
# Many servers repeat `role` in every chunk of a stream, and a tool call's `id` and `name` in every part of it. Nothing
# forbids that, and one would expect `client.chat.completions.stream(...)` to keep the value, as it does for `index` and
# `type`. The helper joins all strings: the final message has role "assistantassistant", and the call is of a tool that does
# not exist. It matters to whoever writes such a server or sends the final message back: the next request is refused or
# misread.
# Seen: "role assistantassistant, id c1c1, name addadd, arguments {\"a\": 1}".
set -euo pipefail
place=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "openai==3.51.0"
cat > server.py <<'PY'
import http.server, json
def chunk(arguments, finish=None):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    choice = {"index": 0, "delta": {"role": "assistant", "tool_calls": [call]}, "finish_reason": finish}
    whole = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "any", "choices": [choice]}
    return f"data: {json.dumps(whole)}\n\n"
class Chat(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = (chunk('{"a": ') + chunk("1}", "tool_calls") + "data: [DONE]\n\n").encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Chat)
open("port", "w").write(str(server.server_port))
server.serve_forever()
PY
python3 server.py & server=$!
while [ ! -s port ]; do sleep 0.1; done
env/bin/python - <<'PY'
import openai
client = openai.OpenAI(base_url=f"http://127.0.0.1:{open('port').read()}/v1", api_key="none")
with client.chat.completions.stream(model="any", messages=[{"role": "user", "content": "1 + 1?"}]) as stream:
    message = stream.get_final_completion().choices[0].message
call = message.tool_calls[0]
seen = f"role {message.role}, id {call.id}, name {call.function.name}, arguments {call.function.arguments}"
print(seen)
raise SystemExit(seen != 'role assistantassistant, id c1c1, name addadd, arguments {"a": 1}')
PY
