"""Pipeline-parallel training of PyTorch models under Slurm and MPI."""

__version__ = "0.1.0"
