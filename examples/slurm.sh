#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=sparse-balance
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Runs another example on every node of a Slurm job, one torchrun per node:
#
#   sbatch examples/slurm.sh examples/qwen2.5_3b_sft.sh [FLAGS OF TRAINING...]
#   sbatch --nodes 1 examples/slurm.sh examples/qwen2.5_0.5b_sft.sh
#
# Submit it from the repository root, with the environment active that holds this package; the
# example's variables (MODEL, RUN, ..) are passed on. Prepare, convert and profile beforehand.

set -euo pipefail

NNODES="${SLURM_NNODES}"
GPUS_PER_NODE="${SLURM_GPUS_ON_NODE}"
read -r MASTER_ADDR < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))" # jobs that share a node do not share a port
export NNODES GPUS_PER_NODE MASTER_ADDR MASTER_PORT

# SLURM_NODEID is known on the node only, hence the inner shell.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK="${SLURM_NODEID}" exec bash "${@}"' node "${@}"
