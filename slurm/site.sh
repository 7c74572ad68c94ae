# What the batch scripts here need to know of your site. Edit once; every script sources it.

# Where Python and MPI come from: modules, a virtual environment, or a container.
# module load openmpi/5.0 cuda/12.4
# source "$HOME/venvs/pdmpi/bin/activate"
container=()                  # (apptainer exec --nv "$HOME/pdmpi.sif")

# What starts the ranks: mpirun or srun-pmix (Open MPI), mpiexec or srun-pmi2 (MPICH).
launcher=${LAUNCHER:-mpirun}

# How often a job is requeued at most, and after how many deaths in a row without a new
# checkpoint it is given up.
max_restarts=100
max_deaths=3

# Inside a job: the launcher for all tasks of the allocation.
launch_command() {
  local per_node=$(((SLURM_NTASKS + SLURM_JOB_NUM_NODES - 1) / SLURM_JOB_NUM_NODES))
  case $launcher in
    mpirun) command=(mpirun -n "$SLURM_NTASKS" --map-by "ppr:$per_node:node" --bind-to none) ;;
    mpiexec) command=(mpiexec -n "$SLURM_NTASKS" -ppn "$per_node") ;;
    srun-*) command=(srun "--mpi=${launcher#srun-}" "--ntasks=$SLURM_NTASKS" --distribution=block
      "--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 --gpu-bind=none) ;;
    *) echo "site.sh: launcher=$launcher: must be mpirun, mpiexec, srun-pmix or srun-pmi2" >&2; exit 2 ;;
  esac
  export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
}
