#!/bin/bash
# One GPU. Submit it from the project's folder: sbatch examples/slurm/one_gpu.sh
# Ten minutes before its time is over the run saves a checkpoint, and the script puts itself back into the queue.
#SBATCH --job-name=flux-4
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=96G
#SBATCH --time=24:00:00
#SBATCH --signal=USR2@600
#SBATCH --open-mode=append
source .venv/bin/activate
export HF_HUB_OFFLINE=1
export HF_HOME=/shared/huggingface
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun branchgrpo train --config examples/flux_lora.yaml --output runs/flux-4 --prompts-per-iteration 4
if [ $? -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
