#!/usr/bin/env bash
# lm-eval 0.4.13, requests 2.x, Python 3.11 (2026-11-30).
#
# An OpenAI server answers a chat that is too long with status 400 and `code: context_length_exceeded`. One would expect
# lm-eval to count that row as wrong. Its route `local-chat-completions` asks three times, raises HTTPError, and no row of
# the evaluation has a result: the command ends with status 1. inspect-ai 0.3.285 ends that sample as `model_length`.
# Seen: "asked 4 times; status 1; results written: 0".
set -euo pipefail
place=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "lm-eval[api]==0.4.13"
cat > server.py <<'PY'
import http.server, json
class Chat(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open("asked", "a") as log:
            log.write("x")
        long = len(asked["messages"][-1]["content"]) > 1000
        error = {"error": {"message": "This model's maximum context length is 100 tokens.", "code": "context_length_exceeded"}}
        answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "14"}, "finish_reason": "stop"}]}
        body = json.dumps(error if long else answer).encode()
        self.send_response(400 if long else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Chat)
open("port", "w").write(str(server.server_port))
server.serve_forever()
PY
python3 - <<'PY'
import json
rows = [{"prompt": "What is 7 + 7?", "answer": "14"}, {"prompt": "x" * 2000, "answer": "14"}]
open("rows.jsonl", "w").write("".join(json.dumps(row) + "\n" for row in rows))
PY
cat > sums.yaml <<'YAML'
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
YAML
python3 server.py & server=$!
while [ ! -s port ]; do sleep 0.1; done
mkdir out
status=0
OPENAI_API_KEY=none HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HOME=$place env/bin/lm_eval --model local-chat-completions \
    --model_args "model=any,base_url=http://127.0.0.1:$(cat port)/v1/chat/completions,num_concurrent=1" \
    --apply_chat_template --include_path . --tasks sums --output_path out > log 2>&1 || status=$?
written=$(find out -type f 2>/dev/null | wc -l)
echo "asked $(wc -c < asked) times; status $status; results written: $written"
[ "$(wc -c < asked)" = 4 ] && [ "$status" = 1 ] && [ "$written" = 0 ]
