#!/usr/bin/env bash
# tensorboardX 2.6.5, tensorboard 2.21.0, Python 3.11 (2026-11-30).
#
# A trainer and an evaluation may write into one directory, and one would expect a file for each writer, as torch's
# `SummaryWriter` makes (its names have the process and a counter). tensorboardX names the file by the second and the host
# and opens it anew: a second writer of the same second, of the same process or another, erases what the first has written.
# Seen: "files: 1; scalars: ['eval']".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "tensorboardX==2.6.5" "tensorboard==2.21.0"
env/bin/python - <<'PY'
import os, time
from tensorboardX import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
time.sleep(1 - time.time() % 1)  # begin with a second, so that both writers open in it
for name in ("train", "eval"):
    with SummaryWriter("logs") as writer:
        writer.add_scalar(name, 1.0, 1)
read = EventAccumulator("logs")
read.Reload()
seen = f"files: {len(os.listdir('logs'))}; scalars: {read.Tags()['scalars']}"
print(seen)
raise SystemExit(seen != "files: 1; scalars: ['eval']")
PY
