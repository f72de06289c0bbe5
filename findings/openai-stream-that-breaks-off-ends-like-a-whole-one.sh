#!/usr/bin/env bash
# openai 3.51.0, Python 3.11 (2026-11-30).
#
# A server that fails in mid-answer can only end the stream, or send an error in it. One would expect the client to raise.
# It raises where the data has a key `error`. A stream that ends without `[DONE]` and without a finish reason is an answer,
# also for `get_final_completion()`. An `event: error` whose data is the error itself (`{"message": ...}`, or `{"object":
# "error", ...}` as some servers write) comes as a chunk with `choices=None`. It matters to collectors of rollouts and
# evaluations: half an answer is graded as a whole one unless finish_reason is read.
# Seen: "cut: 'he' None; event: error: no exception, last chunk's choices None; key error: APIError".
set -euo pipefail
place=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "openai==3.51.0"
cat > server.py <<'PY'
import http.server, json
choice = {"index": 0, "delta": {"role": "assistant", "content": "he"}, "finish_reason": None}
first = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "any", "choices": [choice]}
ends = {
    "cut": "",
    "event": 'event: error\ndata: {"message": "out of memory", "code": 500}\n\n',
    "key": 'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
}
class Chat(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = f"data: {json.dumps(first)}\n\n{ends[asked['model']]}".encode()
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
asked = {"messages": [{"role": "user", "content": "?"}]}
with client.chat.completions.stream(model="cut", **asked) as stream:
    cut = stream.get_final_completion().choices[0]
event = list(client.chat.completions.create(model="event", stream=True, **asked))
try:
    key = len(list(client.chat.completions.create(model="key", stream=True, **asked)))
except openai.APIError as error:
    key = type(error).__name__
seen = f"cut: {cut.message.content!r} {cut.finish_reason}; "
seen += f"event: error: no exception, last chunk's choices {event[-1].choices}; key error: {key}"
print(seen)
raise SystemExit(seen != "cut: 'he' None; event: error: no exception, last chunk's choices None; key error: APIError")
PY
