#!/usr/bin/env bash
# datasets 5.2.0, Python 3.11 (2026-11-30).
#
# `stream.shuffle(seed=1).repeat(3)` is how several epochs over a stream are written. One would expect another order in
# every round, as other pipelines give it and as `set_epoch` gives it here. All rounds have the same order, so the same rows
# meet in a batch in every epoch. (`repeat` before `shuffle` mixes the rounds: a row comes twice before others came once.)
# Seen: "repeat: rounds equal True; set_epoch: rounds equal False; repeat, then shuffle: 1000 rows hold 970 different ones".
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
    return [row["id"] for row in rows]
shuffled = stream.shuffle(seed=1, buffer_size=100)
whole, first = ids(shuffled.repeat(3)), ids(shuffled)
shuffled.set_epoch(1)
mixed = ids(stream.repeat(3).shuffle(seed=1, buffer_size=100))[:1000]
again = whole[:1000] == whole[1000:2000] == whole[2000:]
seen = f"repeat: rounds equal {again}; set_epoch: rounds equal {first == ids(shuffled)}; "
seen += f"repeat, then shuffle: 1000 rows hold {len(set(mixed))} different ones"
print(seen)
raise SystemExit("equal True; set_epoch: rounds equal False" not in seen or len(set(mixed)) == 1000)
PY
