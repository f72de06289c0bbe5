#!/bin/bash
# sbatch slurm.sh jobs.yaml: a host of Motet on each node. More arguments are passed to motet run.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
set -eu
# an environment with motet[ray], and a directory that all nodes see under this path
source "${MOTET_ENVIRONMENT:?is not set: the path of a virtual environment}/bin/activate"
runs=${MOTET_RUNS:?is not set: a directory that all nodes share}

# only who has this token may use the cluster
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
host=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')
address=$host:6379
srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap ray start --head --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
until (exec 3<>"/dev/tcp/$host/6379") 2>/dev/null; do sleep 1; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$first" --overlap \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
fi
srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap motet doctor --ray "$address" --nodes "$SLURM_JOB_NUM_NODES" --directory "$runs"
srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap \
    motet run "$1" --run "$runs/$SLURM_JOB_NAME" --ray "$address" \
    --set engine.hosts="$SLURM_JOB_NUM_NODES" --set engine.threads="$SLURM_CPUS_PER_TASK" --set engine.device=cuda "${@:2}"
