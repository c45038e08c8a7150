#!/bin/bash
# An adapter of FLUX on two nodes of 8 GPUs. Submit it several times from the project's folder:
#   sbatch examples/slurm/two_nodes_lora.sh
# Jobs of one name run one after another, and each goes on from the last checkpoint. One that finds the run finished
# trains nothing.
#SBATCH --job-name=flux-16
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR2@600
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
source .venv/bin/activate
export HF_HUB_OFFLINE=1
export HF_HOME=/shared/huggingface
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# torchrun passes the signals of this list to the training, and waits so many seconds for it
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m branchgrpo.cli train --config examples/flux_lora.yaml --output runs/flux-16
