"""Profiles, clusters and plans: the offline half. No torch, no MPI."""
