"""The manifests that `zero-launch --manifest` prints are what Kubernetes' published schemas ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from zero_launch.kubernetes import KINDS
from zero_launch.manifest import pods_from_options, print_manifest
from zero_launch.options import parser

SCHEMAS = Path(__file__).with_name("schemas")
"""Of the published resource definitions, which each file names with their licence: the fields that manifests use with
all their neighbours' names; a field that does not exist is an error."""
USUAL = ["--image", "registry/train:1", "--nproc", "8"]
FULL = [
    *("--name", "run-1", "--namespace", "team", "--volume", "data:/data", "--volume", "ckpt:/ckpt"),
    *("--nvme", "900Gi:/nvme", "--cpus", "90", "--memory", "800Gi", "--shm", "64Gi", "--save-seconds", "600"),
    *("--restarts", "3", "--log-dir", "/ckpt/logs", "--bind_cores_to_rank"),
]


def printed(kind: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The manifest of a command line, and what was said beside it."""
    print_manifest(parser().parse_args(["--manifest", kind, *words]))
    out, err = capsys.readouterr()
    assert "&id" not in out
    return yaml.safe_load(out), err


def pod_specs(found: dict[str, Any]) -> list[dict[str, Any]]:
    if found["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in found["spec"]["pytorchReplicaSpecs"].values()]
    return [job["template"]["spec"]["template"]["spec"] for job in found["spec"]["replicatedJobs"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [[], ["--nnodes", "4", *FULL], ["--nnodes", "4", "--elastic", "8:32", *FULL]],
    ids=["one", "four", "elastic"],
)
def test_what_is_printed_fits_the_published_schema(
    kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    published = json.loads((SCHEMAS / f"{kind}.json").read_text())
    assert published["licence"] == "Apache-2.0" and kind in published["source"]
    found, err = printed(kind, *USUAL, *words, "train.py", "--lr", "3e-4", capsys=capsys)
    jsonschema.validate(found, published["schema"])
    found["spec"]["tpyo"] = 1
    with pytest.raises(jsonschema.ValidationError, match="tpyo"):
        jsonschema.validate(found, published["schema"])
    assert ("kubectl create secret generic run-1-token -n team" in err) is bool(words)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_what_the_job_needs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = printed(kind, *USUAL, "--nnodes", "4", *FULL, "-m", "project.train", "--verbose", capsys=capsys)
    assert found["metadata"] == {"name": "run-1", "namespace": "team"}
    for pod in pod_specs(found):
        (container,) = pod["containers"]
        command = container["command"]
        assert command[:4] == ["zero-launch", "--nproc", "8", "--requeue"]
        assert command[-3:] == ["--module", "project.train", "--verbose"]
        assert "--no_ssh" in command and "--bind_cores_to_rank" in command and "/ckpt/logs" in command
        token = next(row for row in container["env"] if row["name"] == "ZERO_LAUNCH_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "run-1-token", "key": "token"}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert container["resources"]["requests"] == {"cpu": "90", "memory": "800Gi"}
        assert [m["mountPath"] for m in container["volumeMounts"]] == ["/dev/shm", "/data", "/ckpt", "/nvme"]
        assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "data"}
        assert pod["volumes"][3]["emptyDir"] == {"sizeLimit": "900Gi"}
        assert pod["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_replaces_nothing_in_what_the_user_wrote(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--log-dir", "/logs/$(HOME)", "--record", "$(RECORD)", "train.py", "$(HOME)", "$$(HOME)"]
    found, _ = printed(kind, *USUAL, "--nnodes", "2", *words, capsys=capsys)
    for pod in pod_specs(found):
        command = pod["containers"][0]["command"]
        assert command[command.index("--log-dir") + 1] == "/logs/$$(HOME)"
        assert command[command.index("--record") + 1] == "$$(RECORD)"
        assert command[-2:] == ["$$(HOME)", "$$$$(HOME)"] and "$(POD_IP)" in command


def test_restarts_are_counted_by_job_and_what_saved_before_it_ended_is_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, _ = printed("pytorchjob", *USUAL, "--nnodes", "4", *FULL, "train.py", capsys=capsys)
    assert job["spec"]["runPolicy"]["backoffLimit"] == 3 * 4  # the operator adds up the restarts of all pods
    assert {r["restartPolicy"] for r in job["spec"]["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    jobset, _ = printed("jobset", *USUAL, "--nnodes", "4", *FULL, "train.py", capsys=capsys)
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3 and policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (replicated,) = jobset["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [75] and {rule["action"] for rule in rules} == {"FailJob"}


def test_elastic_jobs_keep_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*USUAL, "--nnodes", "4", "--elastic", "8:32", "--restarts", "3", "train.py"]
    job, _ = printed("pytorchjob", *words, capsys=capsys)
    assert job["spec"]["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 3}  # besides the first pod
    jobset, _ = printed("jobset", *words, capsys=capsys)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    for found in (job, jobset):
        command = pod_specs(found)[0]["containers"][0]["command"]
        assert command[command.index("--elastic") + 1] == "8:32"
        assert command[command.index("--max_restarts") + 1] == "3"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc", "2"], "needs --image"),
        (["--image", "i"], "--nproc: --manifest needs a number"),
        (["--image", "i", "--nproc", "auto"], "--nproc: --manifest needs a number"),
        ([*USUAL, "--nnodes", "2:4"], "--nnodes: --manifest needs a number .* --elastic"),
        ([*USUAL, "--hostfile", "hosts"], "--hostfile: means nothing with --manifest"),
        ([*USUAL, "--launcher", "slurm"], "--launcher: means nothing"),
        ([*USUAL, "--name", "My_Job"], "--name: expected at most 40 of the characters a-z"),
        ([*USUAL, "--name", "a" * 41], "--name"),
        ([*USUAL, "--volume", "data"], "--volume: expected CLAIM:PATH, got 'data'"),
        ([*USUAL, "--volume", "data:relative"], "--volume: expected an absolute path in the pod, got 'relative'"),
        ([*USUAL, "--nvme", "lots:/nvme"], "--nvme: expected a quantity such as 16Gi, got 'lots'"),
        ([*USUAL, "--memory", "12 GB"], "--memory: expected a quantity"),
        ([*USUAL, "--save-seconds", "0"], "--save-seconds"),
        ([*USUAL, "--elastic", "8"], "--elastic: expected MIN:MAX"),
        ([*USUAL, "--nnodes", "2", "--elastic", "40:64"], "--elastic 40:64: the hosts have 16 ranks together"),
    ],
)
def test_what_cannot_be_is_said_by_the_option_s_name(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pods_from_options(parser().parse_args(["--manifest", "jobset", *words, "train.py"]))
