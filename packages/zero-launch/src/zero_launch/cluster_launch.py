"""Jobs on several hosts: which kind of cluster runs them."""

from __future__ import annotations

from zero_launch.elastic_cluster import ElasticCluster
from zero_launch.fixed_cluster import FixedCluster
from zero_launch.spec import ClusterSpec


def launch_cluster(spec: ClusterSpec) -> None:
    """Run the job that ``spec`` describes and return when every rank has ended with status 0.

    Raises ValueError or FileNotFoundError when the job cannot begin as described, LaunchError when a host cannot take
    part, a host is lost, or a rank fails, and LeftEarly when the ranks of a `--requeue` job have saved and left. Then
    every process of the job on every host that can be reached has been ended, and a host that cannot be reached ends
    its own within seconds. A restart or an elastic job continues without a lost host. Signals to this process end the
    job. Call it from the main thread.
    """
    kind = FixedCluster if spec.job.elastic is None else ElasticCluster
    kind(spec).run()
