#!/usr/bin/env bash
# ddp on 8 ranks: sbatch slurm.sh train.py ARGUMENTS
#SBATCH --job-name=dsplan
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# 120 seconds before its time is up, or when another job takes its place, it saves and is queued again.
set -uo pipefail

run_directory=${RUN_DIRECTORY:-$PWD/dsplan-$SLURM_JOB_ID}  # on a file system that all nodes share
if [ -e "$run_directory/launch.json" ]; then
    arguments=(--resume "$run_directory")
else
    arguments=(--run-dir "$run_directory" --plan plan.yaml --launcher slurm --nodes 1)
    arguments+=(--grace-seconds 100 "$@")
fi
dsplan run "${arguments[@]}" &
trap 'kill -USR1 $!' USR1 TERM
while true; do
    wait $!
    status=$?
    # A trap ends `wait` with 128 and the signal's number; then the run is still saving.
    if [ "$status" -ne 138 ] && [ "$status" -ne 143 ]; then break; fi
done
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
