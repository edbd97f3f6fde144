"""The manifest of a job for Kubernetes: a PyTorchJob of Kubeflow's training operator, or a JobSet.

[Note: pods] Every pod is a node with a launcher of its own (`--no_ssh`); the first leads. A pod that is to end gets
SIGTERM: its launcher has the job save (`--requeue`), and every pod ends with status 75, to be started again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_launch.handshake import TOKEN_VARIABLE
from zero_launch.host_bounds import host_bounds
from zero_launch.orders import LEFT_STATUS

KINDS = ("jobset", "pytorchjob")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 40  # what schedulers add to it for the names of pods has room in the 63 characters of a DNS label
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
_CONTAINER = "pytorch"  # the name that the training operator looks for
_WORKERS = "workers"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class Pods:
    """The pods of a job, from which a manifest is made: ``nodes`` of them with ``nproc`` ranks each.

    ``name``: the job's, at most 40 characters. ``image``: the container image with the script and zero-launch.
    ``arguments``: the target and its own arguments; ``options``: more options of zero-launch. ``namespace``: None for
    Kubernetes' default. ``port``: where the first pod's launcher listens. ``token_secret``: name of the Secret with the
    pods' token; empty for one named after the job.

    ``claims``: (claim, path) of the persistent volumes, for checkpoints and data. ``disks``: (size, path) of scratch
    space on the node's own disk, for the NVMe tier. ``shared_memory``: size of /dev/shm. ``gpus``: the resource's name,
    of which each rank gets one; empty for none. ``cpus``, ``memory``: requests of a pod. ``save_seconds``: how long a
    pod that is to end may take to save. ``elastic``: the least and the most ranks. ``restarts``: of the job after
    failures; one that saved before it ended is always started again.

    Raises ValueError, naming the option, for names, sizes and paths that Kubernetes would refuse, no pods, no time to
    save, and bounds of ``elastic`` that no number of pods meets.
    """

    name: str
    image: str
    arguments: Sequence[str]
    nodes: int = 1
    nproc: int = 1
    namespace: str | None = None
    claims: Sequence[tuple[str, str]] = ()
    disks: Sequence[tuple[str, str]] = ()
    shared_memory: str = "16Gi"
    gpus: str = "nvidia.com/gpu"
    cpus: str | None = None
    memory: str | None = None
    save_seconds: int = 120
    restarts: int = 0
    elastic: tuple[int, int] | None = None
    port: int = 29500
    token_secret: str = ""
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _MOST_NAME:
            raise ValueError(
                f"--name: expected at most {_MOST_NAME} of the characters a-z, 0-9 and '-', a letter first, got "
                f"{self.name!r}"
            )
        if not self.image:
            raise ValueError("--image: expected the container image that has the script and zero-launch, got ''")
        if self.nodes < 1:
            raise ValueError(f"--nnodes: expected at least 1 pod, got {self.nodes}")
        if self.save_seconds < 1:
            raise ValueError(f"--save-seconds: expected at least 1, got {self.save_seconds}")
        sizes = {"--shm": self.shared_memory, "--memory": self.memory, "--cpus": self.cpus}
        for option, size in [*sizes.items(), *(("--nvme", size) for size, _ in self.disks)]:
            if size is not None and not _SIZE.fullmatch(size):
                raise ValueError(f"{option}: expected a quantity such as 16Gi, got {size!r}")
        for option, volumes in (("--volume", self.claims), ("--nvme", self.disks)):
            for what, path in volumes:
                if not path.startswith("/"):
                    raise ValueError(f"{option}: expected an absolute path in the pod, got {path!r} for {what!r}")
        if self.elastic is not None:
            self.host_bounds()

    def host_bounds(self) -> tuple[int, int]:
        """Return the fewest and the most pods with which the job runs; all of them without ``elastic``.

        Raises ValueError if ``elastic`` fits no number of pods.
        """
        least, most = self.elastic or (self.nodes * self.nproc, self.nodes * self.nproc)
        return host_bounds([self.nproc] * self.nodes, least, most)

    @property
    def secret(self) -> str:
        """Name of the Secret whose key `token` holds the token that the pods' launchers share."""
        return self.token_secret or f"{self.name}-token"


def manifest(kind: str, pods: Pods) -> dict[str, Any]:
    """Return the Kubernetes object that runs the job, as plain data for YAML or JSON. ``kind``: one of `KINDS`."""
    return _pytorchjob(pods) if kind == "pytorchjob" else _jobset(pods)


def _pytorchjob(pods: Pods) -> dict[str, Any]:
    """Return the manifest of a PyTorchJob for ``pods``, as plain data. Its operator gives every pod the variables
    PET_NODE_RANK and PET_MASTER_ADDR, as there is a Master."""
    template = {"spec": _pod_spec(pods, node_rank="$(PET_NODE_RANK)", address="$(PET_MASTER_ADDR)", variables=[])}
    # Restarts of all containers are counted together; a round restarts one in each pod.
    replica = {"restartPolicy": "OnFailure", "template": template}
    specs = {"Master": {"replicas": 1, **replica}}
    if pods.nodes > 1:
        specs["Worker"] = {"replicas": pods.nodes - 1, **copy.deepcopy(replica)}
    spec: dict[str, Any] = {
        "nprocPerNode": str(pods.nproc),
        "runPolicy": {"backoffLimit": max(1, pods.restarts) * pods.nodes, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": specs,
    }
    if pods.elastic is not None and pods.nodes > 1:
        least, most = pods.host_bounds()
        spec["elasticPolicy"] = {"minReplicas": max(1, least - 1), "maxReplicas": max(1, most - 1)}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(pods), "spec": spec}


def _jobset(pods: Pods) -> dict[str, Any]:
    """Return the manifest of a JobSet of one indexed Job for ``pods``, as plain data. The other pods find the first by
    its DNS name."""
    variables = [{"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}]
    address = f"{pods.name}-{_WORKERS}-0-0.{pods.name}"
    pod = _pod_spec(pods, node_rank="$(PET_NODE_RANK)", address=address, variables=variables if pods.nodes > 1 else [])
    left = {"onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [LEFT_STATUS]}}
    moved = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    # An elastic job continues without a pod until there is another; others start again as a whole.
    action = "FailJob" if pods.elastic is None else "Ignore"
    job = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0 if pods.elastic is None else pods.restarts * pods.nodes,
        "podFailurePolicy": {"rules": [{"action": action, **left}, {"action": action, **moved}]},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    again = {
        "name": "saved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts, "rules": [again]},
        "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(pods), "spec": spec}


def _escaped(words: Sequence[str]) -> list[str]:
    """Return ``words`` of a command line with every `$` doubled, because Kubernetes replaces `$(NAME)` by a variable's
    value, and `$$` by `$`."""
    return [word.replace("$", "$$") for word in words]


def _metadata(pods: Pods) -> dict[str, Any]:
    """Return the object's `metadata`: its name, and its namespace if one was named."""
    return {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}


def _pod_spec(pods: Pods, *, node_rank: str, address: str, variables: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `spec` of a pod, as plain data: one container, its volumes, and the time to save before it is killed.

    ``node_rank``, ``address``: the pod's number and the first pod's address, as texts in which Kubernetes replaces
    `$(NAME)`. ``variables``: entries of `env` for the variables in them. With a single pod none of them is used.
    """
    command = ["zero-launch", "--nproc", str(pods.nproc), "--requeue", *_escaped(pods.options)]
    container: dict[str, Any] = {"name": _CONTAINER, "image": pods.image}
    if pods.nodes > 1:
        where = ["--nnodes", str(pods.nodes), "--node_rank", node_rank]
        where += ["--master_addr", address, "--master_port", str(pods.port), "--bind_addr", "$(POD_IP)"]
        command += ["--no_ssh", *where]
        token = {"secretKeyRef": {"name": pods.secret, "key": "token"}}
        container["env"] = [
            *variables,
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": TOKEN_VARIABLE, "valueFrom": token},
        ]
        container["ports"] = [{"name": "pytorchjob-port", "containerPort": pods.port}]
    container["command"] = [*command, *_escaped(pods.arguments)]
    requests = {"cpu": pods.cpus, "memory": pods.memory}
    resources: dict[str, Any] = {}
    if any(requests.values()):
        resources["requests"] = {name: amount for name, amount in requests.items() if amount is not None}
    if pods.gpus:
        resources["limits"] = {pods.gpus: pods.nproc}
    if resources:
        container["resources"] = resources
    mounts = [("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}})]
    for number, (claim, path) in enumerate(pods.claims):
        mounts.append((f"claim-{number}", path, {"persistentVolumeClaim": {"claimName": claim}}))
    for number, (size, path) in enumerate(pods.disks):
        mounts.append((f"disk-{number}", path, {"emptyDir": {"sizeLimit": size}}))
    container["volumeMounts"] = [{"name": name, "mountPath": path} for name, path, _ in mounts]
    return {
        "terminationGracePeriodSeconds": pods.save_seconds,
        "containers": [container],
        "volumes": [{"name": name, **volume} for name, _, volume in mounts],
    }
