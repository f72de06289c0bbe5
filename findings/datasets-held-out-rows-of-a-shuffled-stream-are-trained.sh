#!/usr/bin/env bash
# datasets 5.2.0, Python 3.11 (2026-11-30).
#
# A stream is shuffled and then split: `held_out = stream.take(100)`, `train = stream.skip(100)`. One would expect the
# held-out rows to stay out of training. They do in epoch 0. Trainers call `train.set_epoch(1)` for the next epoch: the
# stream is shuffled anew below the split, another 100 rows are skipped, and a third of the held-out rows is trained from
# then on. Splitting before the shuffle keeps them apart.
# Seen: "held-out rows of 100 in epochs 0, 1, 2 of training: [0, 31, 29]; split before the shuffle: [0, 0, 0]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
from datasets import Dataset
stream = Dataset.from_dict({"id": list(range(1000))}).to_iterable_dataset(num_shards=8)
def ids(rows):
    return {row["id"] for row in rows}
def trained(held_out, train):
    held, counts = ids(held_out), []
    for epoch in range(3):
        train.set_epoch(epoch)
        counts.append(len(held & ids(train)))
    return counts
shuffled = stream.shuffle(seed=1, buffer_size=100)
after = trained(shuffled.take(100), shuffled.skip(100))
before = trained(stream.take(100), stream.skip(100).shuffle(seed=1, buffer_size=100))
seen = f"held-out rows of 100 in epochs 0, 1, 2 of training: {after}; split before the shuffle: {before}"
print(seen)
raise SystemExit(seen != "held-out rows of 100 in epochs 0, 1, 2 of training: [0, 31, 29]; split before the shuffle: [0, 0, 0]")
PY
