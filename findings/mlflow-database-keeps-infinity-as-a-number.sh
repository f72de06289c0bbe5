#!/usr/bin/env bash
# mlflow-skinny 3.17.2, sqlalchemy 2.x, Python 3.11 (2026-11-30).
#
# One would expect a metric to come back as it was logged, whatever store is behind. In a database infinity comes back as
# 1.7976931348623157e+308, an ordinary number: averages and plots take it and `math.isinf` is false; a store of files keeps
# infinity. Three equal values of one step and millisecond are kept once. NaN is kept. It matters for runs that diverge: exp
# of a logprob gap is exactly where infinities come from.
# Seen: "inf -> 1.7976931348623157e+308, nan -> nan; three equal values: 1".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "mlflow-skinny==3.17.2" "sqlalchemy<3" alembic
env/bin/python - <<'PY'
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///runs.db")
run = client.create_run(client.create_experiment("any")).info.run_id
for step, value in enumerate((float("inf"), float("nan"))):
    client.log_metric(run, "gap", value, step=step)
for _ in range(3):
    client.log_metric(run, "reward", 0.5, step=1, timestamp=1_000)
gap = [metric.value for metric in client.get_metric_history(run, "gap")]
seen = f"inf -> {gap[0]}, nan -> {gap[1]}; three equal values: {len(client.get_metric_history(run, 'reward'))}"
print(seen)
raise SystemExit(seen != "inf -> 1.7976931348623157e+308, nan -> nan; three equal values: 1")
PY
