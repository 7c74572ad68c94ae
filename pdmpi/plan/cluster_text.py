"""Writing a cluster description as the TOML that people edit."""

from __future__ import annotations

import json

from pdmpi.plan.cluster import Cluster

__all__ = ["cluster_to_text"]


def cluster_to_text(cluster: Cluster, description: str) -> str:
    """Return the TOML of a cluster with one kind of device; `load_cluster` reads the same back."""
    device = cluster.device(0)
    lines = [
        f"# {description}",
        f"name = {json.dumps(cluster.name)}",
        f"description = {json.dumps(description)}",
        f"num_devices = {cluster.num_devices}",
        f"devices_per_node = {cluster.devices_per_node}",
    ]
    for level in cluster.levels:
        lines += [
            "",
            "[[levels]]",
            f"name = {json.dumps(level.name)}",
            f"count = {level.count}",
            f'bandwidth = "{level.bandwidth_bytes_per_s / 1e6:.6g} MB/s"',
            f'latency = "{level.latency_s * 1e6:.6g} us"',
        ]
        lines += ["shared = true"] if level.shared else []
        if level.allreduce_efficiency != 1.0:
            lines.append(f"allreduce_efficiency = {level.allreduce_efficiency:.3g}")
        if level.allreduce_work_s_per_byte:
            lines.append(f"allreduce_work_s_per_byte = {level.allreduce_work_s_per_byte:.3g}")
    lines += [
        "",
        "[[devices]]",
        f"name = {json.dumps(device.name)}",
        f'memory = "{device.memory_bytes / 2**20:.6g} MiB"',
        f"relative_speed = {device.relative_speed:.3g}",
    ]
    return "\n".join(lines) + "\n"
