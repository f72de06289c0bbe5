#!/bin/bash
# sbatch slurm_torchrun.sh jobs.yaml: one base in shards over all nodes, a process on each. More arguments are passed to
# motet run.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
set -eu
# an environment with Motet, and a directory that all nodes see under this path
source "${MOTET_ENVIRONMENT:?is not set: the path of a virtual environment}/bin/activate"
runs=${MOTET_RUNS:?is not set: a directory that all nodes share}

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=1 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" \
    -m motet run "$1" --set run="$runs/$SLURM_JOB_NAME" --set cluster.launcher=torchrun \
    --set engine.shard="$SLURM_JOB_NUM_NODES" --set engine.threads="$SLURM_CPUS_PER_TASK" "${@:2}"
